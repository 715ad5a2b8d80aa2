"""The number of zeros in a gradient of 2 ** 24 + 1 entries, all of which are 0."""

from ...defects.labs.lab import start

ZEROS = 2**24 + 1


def reproduce():
    import torch
    from megatron.core.optimizer.clip_grads import count_zeros_fp32

    start()
    param = torch.nn.Parameter(torch.empty(ZEROS, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    return str(ZEROS), str(int(count_zeros_fp32([param], torch.distributed.group.WORLD)))
