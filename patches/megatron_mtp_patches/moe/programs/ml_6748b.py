"""The load balancing loss with which the MTP head of a hybrid model trains that runs for two depths: with all experts
chosen for each token it is 1.
"""

import importlib

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


def find_hybrid_model():
    """The class and the layers; before 0.18 they are called after Mamba."""
    try:
        specs = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs")
        return importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel, specs.hybrid_stack_spec
    except ModuleNotFoundError:
        specs = importlib.import_module("megatron.core.models.mamba.mamba_layer_specs")
        return importlib.import_module("megatron.core.models.mamba.mamba_model").MambaModel, specs.mamba_stack_spec
