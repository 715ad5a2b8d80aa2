"""The overrides on real Megatron classes, one rank, in a rehearsal; with TEST_DEVICE=gpu on a GPU.

There a tensor lies on the GPU unless a test says otherwise.
"""

import pytest

from tests.warm.levels import ON_GPU


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    import torch
    from megatron.core import parallel_state

    if ON_GPU:
        torch.set_default_device("cuda")
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    else:
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    yield
    torch.distributed.destroy_process_group()
