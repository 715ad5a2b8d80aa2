"""The random states of experts on two expert-parallel ranks, saved in the format torch_dist and loaded again."""

import tempfile
from types import SimpleNamespace

import torch

from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("megatron.training",)
STREAM = "expert-parallel-rng"


def reproduce():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import global_vars
    from megatron.training.checkpointing import get_rng_state

    start(expert_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    global_vars.set_args(SimpleNamespace(data_parallel_random_init=False))
    torch.cuda.get_rng_state = lambda: torch.zeros(1)  # there is no such generator on a CPU
    get_cuda_rng_tracker().set_states({STREAM: torch.tensor([rank])})
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)

    def describe_states():
        groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        return {"rng_state": get_rng_state("torch_dist", *groups)}

    dist_checkpointing.save(describe_states(), folder[0])
    (loaded,) = dist_checkpointing.load(describe_states(), folder[0])["rng_state"]
    states = [None, None]
    torch.distributed.all_gather_object(states, int(loaded["rng_tracker_states"][STREAM]))
    return [0, 1], states
