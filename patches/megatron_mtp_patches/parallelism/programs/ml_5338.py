"""reduce_from_tensor_model_parallel_region of a transposed tensor of ones on two tensor-parallel ranks: the sum."""

from ...defects.labs.lab import start

RANKS = 2
WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    start(tensor_model_parallel_size=2)
    return 2.0, float(reduce_from_tensor_model_parallel_region(torch.ones(3, 2).t()).max())
