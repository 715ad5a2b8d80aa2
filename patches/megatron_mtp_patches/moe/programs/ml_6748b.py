"""The load balancing loss with which the MTP head of a hybrid model trains that runs for two depths: with all experts
chosen for each token it is 1.
"""

from ...defects.labs.hybrid_lab import find_hybrid_model
from ...defects.labs.lab import LENGTH, VOCABULARY, compute_gradients, make_config, make_ddp, start

NEEDS = ("transformer-engine",)


def reproduce():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    start()
    config = make_config(
        num_moe_experts=2,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
        mtp_num_layers=2,
        mtp_use_repeated_layer=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=False,
    )
    model, spec = find_hybrid_model()
    trained = []
    attach = MoEAuxLossAutoScaler.apply

    def attach_and_note(output, loss):
        trained.append(float(loss))
        return attach(output, loss)

    MoEAuxLossAutoScaler.apply = attach_and_note
    compute_gradients(make_ddp(config, model(config, spec, VOCABULARY, LENGTH, hybrid_layer_pattern="*-/*E/*E")))
    return 1.0, sum(trained)
