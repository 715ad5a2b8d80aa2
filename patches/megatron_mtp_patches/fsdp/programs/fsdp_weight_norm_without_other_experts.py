"""The norm of the weights that Megatron's trainer logs, under Megatron-FSDP with two experts in each layer, one on each
of two ranks, where each weight is 1.
"""

from ...defects.labs.fsdp_lab import train_gpt
from ...defects.labs.lab import gather, start

RANKS = 2
NEEDS = ("transformer-engine", "megatron.training")


def reproduce():
    from megatron.training.utils import calc_dtensor_params_l2_norm

    start(expert_model_parallel_size=2)
    optimizer, weights = train_gpt("optim_grads_params", expert_model_parallel_size=2)
    for param in optimizer.get_parameters():
        param._local_tensor.data.fill_(1.0)
    norms = gather(calc_dtensor_params_l2_norm(optimizer.get_parameters()))
    return [weights**0.5] * len(norms), norms
