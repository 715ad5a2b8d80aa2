"""A checked step has the collectives and the reads on the host that docs/watch.md states, and the others have none."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("watch-invariants"), pytest.mark.ranks(2)]

READS = ("item", "tolist", "nonzero", "__int__", "__float__", "__bool__")


@pytest.fixture
def calls(monkeypatch):
    """The bytes of each all-reduce, and the names of other collectives and of reads, since the test asked for this."""
    called = []

    def count(owner, name, describe):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            called.append(describe(args))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(dist, "all_reduce", lambda args: args[0].nbytes)
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
        count(dist, name, lambda args, name=name: name)
    for name in READS:
        count(torch.Tensor, name, lambda args: "read")
    return called


def test_a_checked_step_has_so_many_collectives_and_reads(train, calls):
    by_step = {}

    def split(training, step):
        by_step[step - 1] = Counter(calls)
        calls.clear()

    training = train({"tensor_model_parallel_size": 2}, steps=7, fault=split, watch_invariants=2, clip_grad=1.0)
    assert by_step[4] == by_step[6], "steps 4 and 6 are not checked"
    more = by_step[5] - by_step[4]
    shared = training.optimizer.step.func.__self__._copies.size
    assert more.pop("read") in (15, 16)  # the norm of an update may be on the device
    batches = {2 * 64: 1, 2 * 128: 1}
    assert shared > 50 and more == Counter({16 * shared: 1, 16: 2, 8: 4} | batches)
