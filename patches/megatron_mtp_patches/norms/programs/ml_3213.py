"""A layer of MLA on two tensor-parallel ranks, and a gradient of 1 for each weight of its down projection alone: the
gradient norm. Each rank has a copy of this projection.
"""

from ...defects.labs.lab import make_ddp, make_optimizer, start
from ...defects.labs.latent_lab import make_attention

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start(tensor_model_parallel_size=2)
    layer = make_attention(tensor_model_parallel_size=2)
    model = make_ddp(layer.config, layer)
    optimizer = make_optimizer(model)
    for name, param in model.named_parameters():
        param.main_grad.fill_("down_proj" in name)
    _, grad_norm, _ = optimizer.step()
    return layer.linear_kv_down_proj.weight.numel() ** 0.5, float(grad_norm)
