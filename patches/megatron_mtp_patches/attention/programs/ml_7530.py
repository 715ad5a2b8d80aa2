"""Four learnable attention sinks in each of two layers (--softmax-type learnable) on two tensor-parallel ranks, and a
gradient of 1 for each sink alone: the gradient norm.
"""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, start

RANKS = 2


def reproduce():
    start(tensor_model_parallel_size=2)
    config = make_config(tensor_model_parallel_size=2, softmax_type="learnable")
    model = make_ddp(config, make_gpt(config))
    optimizer = make_optimizer(model)
    for name, param in model.named_parameters():
        param.main_grad.fill_("softmax_offset" in name)
    _, grad_norm, _ = optimizer.step()
    return (4 * config.num_layers) ** 0.5, float(grad_norm)
