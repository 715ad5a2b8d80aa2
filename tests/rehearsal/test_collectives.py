"""The collectives that Megatron asks of NCCL run on gloo, on two ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = [pytest.mark.forked("torch"), pytest.mark.ranks(2)]


@pytest.fixture(scope="module")
def rank():
    return int(os.environ["RANK"])


@pytest.fixture(scope="module")
def value(rank):
    """The value of this rank: 1 on rank 0, 2 on rank 1."""
    return rank + 1.0


@pytest.fixture(scope="module", autouse=True)
def group(rank):
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank), pg_options=object())
    yield
    dist.destroy_process_group()


def test_nccl_groups_run_on_gloo(rank):
    assert torch.cuda.device_count() == dist.get_world_size() == 2
    assert torch.cuda.current_device() == rank
    assert dist.get_backend() == "gloo"
    assert dist.get_backend(dist.new_group([0, 1], backend="nccl", pg_options=object())) == "gloo"
    assert dist.get_backend(dist.new_group([0, 1])) == "gloo"
    dist.barrier(device_ids=[rank])


def test_average(value):
    tensor = torch.full((3,), value, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [1.5] * 3


def test_premultiplied_sum(rank, value):
    quarter = dist._make_nccl_premul_sum(0.25)
    tensor = torch.full((2,), value)
    dist.all_reduce(tensor, quarter)
    assert tensor.tolist() == [0.75] * 2
    source, shard = torch.tensor([value, 4 * value]), torch.zeros(1)
    dist.reduce_scatter_tensor(shard, source, op=quarter)
    assert shard.tolist() == [[0.75], [3.0]][rank]
    assert source.tolist() == [value, 4 * value]


def test_coalesced_collectives_finish_with_their_block(value):
    first, second = torch.zeros(1), torch.zeros(1)
    with _coalescing_manager(None, async_ops=True) as manager:
        dist.reduce_scatter_tensor(first, torch.ones(2))
        dist.reduce_scatter_tensor(second, torch.full((2,), value), op=dist._make_nccl_premul_sum(2.0))
    assert (first.item(), second.item()) == (2.0, 6.0)
    first.fill_(7.0)
    manager.wait()
    assert first.item() == 7.0


@pytest.mark.parametrize("async_op", [False, True])
def test_gathering_unequal_sizes(rank, value, async_op):
    gathered = [torch.zeros(2), torch.zeros(3, 1)]
    tensor = torch.full(gathered[rank].shape, value)
    work = dist.all_gather(gathered, tensor, async_op=async_op)
    assert (work is None) is not async_op
    if work is not None:
        assert work.wait() and work.is_completed()
    assert [one.flatten().tolist() for one in gathered] == [[1.0] * 2, [2.0] * 3]


def test_gathering_equal_sizes_works_asynchronously(value):
    gathered = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(gathered, torch.full((2,), value), async_op=True).wait()
    assert [one.tolist() for one in gathered] == [[1.0] * 2, [2.0] * 2]


def test_scattering_unequal_sizes(rank, value):
    output = torch.zeros(2 + rank)
    dist.reduce_scatter(output, [torch.full((2,), value), torch.full((3,), 10 * value)])
    assert output.tolist() == [[3.0] * 2, [30.0] * 3][rank]


def test_all_groups_share_one_polling_thread():
    """Without sharing each group has its own thread, and a hundred threads leave no time for anything else."""
    groups = [dist.new_group([0, 1]) for _ in range(5)]
    dist.all_reduce(torch.ones(1), group=groups[-1])
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop") == 1
