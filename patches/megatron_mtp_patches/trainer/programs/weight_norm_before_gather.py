"""The norm of the weights that Megatron's trainer logs after a step in fp32, on two ranks with the distributed
optimizer and the overlap of its gathers. It is to be that of the weights that the next step gathers.
"""

from ...defects.labs.lab import compute_gradients, gather, make_config, make_ddp, make_gpt, make_optimizer, start
from ...defects.labs.trainer_lab import norm_of_weights

RANKS = 2
NEEDS = ("megatron.training",)


def reproduce():
    start()
    config = make_config()
    model = make_ddp(
        config, make_gpt(config), use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    optimizer = make_optimizer(model, use_distributed_optimizer=True, overlap_param_gather=True)
    compute_gradients(model)
    optimizer.step()
    early = gather(norm_of_weights(model, bf16=False))
    model.start_param_sync(force_sync=True)
    return gather(norm_of_weights(model, bf16=False)), early
