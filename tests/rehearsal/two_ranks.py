"""Runs on two ranks inside a rehearsal, see test_replayed.py."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

RANK = int(os.environ["RANK"])
MINE = RANK + 1.0  # 1 on rank 0, 2 on rank 1


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.cuda.set_device(RANK)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", RANK), pg_options=object())
    yield
    dist.destroy_process_group()


def test_nccl_groups_run_on_gloo():
    assert torch.cuda.device_count() == dist.get_world_size() == 2
    assert torch.cuda.current_device() == RANK
    assert dist.get_backend() == "gloo"
    assert dist.get_backend(dist.new_group([0, 1], backend="nccl", pg_options=object())) == "gloo"
    assert dist.get_backend(dist.new_group([0, 1])) == "gloo"
    dist.barrier(device_ids=[RANK])


def test_average():
    tensor = torch.full((3,), MINE, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [1.5] * 3


def test_premultiplied_sum():
    quarter = dist._make_nccl_premul_sum(0.25)
    tensor = torch.full((2,), MINE)
    dist.all_reduce(tensor, quarter)
    assert tensor.tolist() == [0.75] * 2
    source, shard = torch.tensor([MINE, 4 * MINE]), torch.zeros(1)
    dist.reduce_scatter_tensor(shard, source, op=quarter)
    assert shard.tolist() == [[0.75], [3.0]][RANK]
    assert source.tolist() == [MINE, 4 * MINE]


def test_coalesced_collectives():
    first, second = torch.zeros(1), torch.zeros(1)
    with _coalescing_manager(None, async_ops=True) as manager:
        dist.reduce_scatter_tensor(first, torch.ones(2))
        dist.reduce_scatter_tensor(second, torch.full((2,), MINE), op=dist._make_nccl_premul_sum(2.0))
    manager.wait()
    assert (first.item(), second.item()) == (2.0, 6.0)


@pytest.mark.parametrize("async_op", [False, True])
def test_gathering_unequal_sizes(async_op):
    gathered = [torch.zeros(2), torch.zeros(3, 1)]
    mine = torch.full(gathered[RANK].shape, MINE)
    work = dist.all_gather(gathered, mine, async_op=async_op)
    assert (work is None) is not async_op
    if work is not None:
        assert work.wait() and work.is_completed()
    assert [one.flatten().tolist() for one in gathered] == [[1.0] * 2, [2.0] * 3]


def test_gathering_equal_sizes_stays_asynchronous():
    gathered = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(gathered, torch.full((2,), MINE), async_op=True).wait()
    assert [one.tolist() for one in gathered] == [[1.0] * 2, [2.0] * 2]


def test_scattering_unequal_sizes():
    output = torch.zeros(2 + RANK)
    dist.reduce_scatter(output, [torch.full((2,), MINE), torch.full((3,), 10 * MINE)])
    assert output.tolist() == [[3.0] * 2, [30.0] * 3][RANK]


def test_coalesced_collectives_have_ended_with_their_block():
    total = torch.zeros(1)
    with _coalescing_manager(async_ops=True) as handle:
        dist.reduce_scatter_tensor(total, torch.full((2,), MINE))
    assert total.tolist() == [3.0]
    total.fill_(7.0)
    handle.wait()
    assert total.tolist() == [7.0]


def test_all_groups_share_one_polling_thread():
    """Each would have its own; a hundred leave no time for anything else."""
    groups = [dist.new_group([0, 1]) for _ in range(5)]
    dist.all_reduce(torch.ones(1), group=groups[-1])
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop") == 1
