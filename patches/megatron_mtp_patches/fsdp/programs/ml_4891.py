"""The gradient norm of Megatron-FSDP with two optimizer instances of two ranks, which share out the optimizer state,
where each gradient is 1.
"""

from ...defects.labs.fsdp_lab import shard_over_instances
from ...defects.labs.lab import compute_gradients, gather, make_optimizer, sum_over_ranks

RANKS = 4
NEEDS = ("einops",)


def reproduce():
    _, model = shard_over_instances("optim")
    optimizer = make_optimizer(model, use_distributed_optimizer=True)
    compute_gradients(model)
    grads = [param.grad for param in optimizer.get_parameters() if param.grad is not None]
    entries = sum_over_ranks(sum(grad._local_tensor.fill_(1.0).numel() for grad in grads))
    _, norm, _ = optimizer.step()
    return [entries**0.5] * RANKS, gather(float(norm))
