"""Tests that run on forked ranks, over gloo on CPUs: on 2, and on 4 where that makes a difference.

A collective that not all ranks enter fails the test after a minute instead of hanging it.
"""

import contextlib
from datetime import timedelta

import pytest


@pytest.fixture(scope="session", autouse=True)
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def parallel():
    """parallel(**sizes) sets up Megatron's process groups, those of the last test if they have these sizes.

    Each of the thirty groups has threads of its own, which live until the group is destroyed.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    made = []
    last = []

    def initialize(**sizes):
        if last != [sizes]:
            destroy()
            last[:] = [sizes]
            with pytest.MonkeyPatch.context() as patch:
                original = dist.new_group
                patch.setattr(dist, "new_group", lambda *args, **kwargs: keep(original(*args, **kwargs)))
                parallel_state.initialize_model_parallel(**sizes)
        return parallel_state

    def destroy():
        parallel_state.destroy_model_parallel()
        while made:
            with contextlib.suppress(ValueError):  # Megatron has destroyed it
                dist.destroy_process_group(made.pop())

    def keep(group):
        if group not in (dist.GroupMember.NON_GROUP_MEMBER, None):
            made.append(group)
        return group

    yield initialize
    destroy()


@pytest.fixture
def rank():
    import torch.distributed as dist

    return dist.get_rank()


@pytest.fixture
def world_size():
    import torch.distributed as dist

    return dist.get_world_size()


@pytest.fixture
def from_all_ranks():
    """from_all_ranks(value): the values of all ranks, in their order."""

    import torch.distributed as dist

    def gather(value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    return gather


@pytest.fixture
def count_collectives(monkeypatch):
    """The names of the collectives that ran since the test asked for this fixture."""
    import torch.distributed as dist

    called = []

    def count(name, original):
        def counted(*args, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier"):
        count(name, getattr(dist, name))
    return called


@pytest.fixture
def fill_gradients():
    """fill_gradients(model, value): every gradient element of a DDP model, as after backward and its reduction."""

    def fill(model, value):
        for buffer in model.buffers + model.expert_parallel_buffers:
            buffer.grad_data.fill_(value)

    return fill


@pytest.fixture
def make_ddp_model():
    """make_ddp_model(): a small bf16 model in Megatron's DDP with a distributed optimizer's buffers."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    def make(**ddp):
        torch.manual_seed(0)
        return DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **ddp}),
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16(),
        )

    return make
