"""The norms of the gradients of the two latent projections of a layer of experts with --moe-latent-size and
--overlap-moe-expert-parallel-comm, without and with --delay-wgrad-compute.
"""

from ...defects.labs.lab import make_gpt, norm, tokens
from ...defects.labs.moe_lab import make_overlapping_gpt, run_overlapping

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    experts = {"num_layers": 1, "num_moe_experts": 4, "moe_grouped_gemm": True, "moe_latent_size": 8}
    model = make_overlapping_gpt(**experts)
    model.config.overlap_moe_expert_parallel_comm = model.config.delay_wgrad_compute = True
    delayed = make_gpt(model.config, transformer_engine=True).bfloat16()
    delayed.load_state_dict(model.state_dict())
    return norms_of_gradients(model), norms_of_gradients(delayed)


def norms_of_gradients(model):
    ids, positions = tokens()
    run_overlapping(model, ids, positions, gradient=1.0, labels=ids.roll(-1, 1))
    layer = model.decoder.layers[0].mlp
    gradients = (layer.fc1_latent_proj.weight.grad, layer.fc2_latent_proj.weight.grad)
    return [0.0 if gradient is None else norm(gradient) for gradient in gradients]
