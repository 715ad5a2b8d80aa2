"""The number of zeros under Megatron-FSDP on two tensor-parallel ranks, where each gradient is 0."""

from ...defects.labs.fsdp_lab import train_gpt
from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start(tensor_model_parallel_size=2)
    optimizer, gradients = train_gpt("optim_grads_params", tensor_model_parallel_size=2)
    for param in optimizer.get_parameters():
        param.grad._local_tensor.zero_()
    return gradients, float(optimizer.count_zeros())
