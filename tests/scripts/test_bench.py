"""python -m scripts.bench: what it counts, and the targets that its rows are held against."""

import argparse
import json

import pytest
import torch

from scripts.bench import acceptance, results, startup, step
from scripts.bench.counting import count, tally
from scripts.bench.ratios import Side, ratio, step_row
from scripts.bench.tables import tables

pytestmark = pytest.mark.forked("torch")


def test_it_counts_what_a_step_reduces_and_reads():
    """Not what torch's optimizer reads of its own counters, which lie on the host."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    param = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([param], foreach=False)

    def step():
        for _ in range(2):
            torch.distributed.all_reduce(param.detach())
        assert param.sum() > 0
        param.detach()[0].item()
        param.tolist()
        param.grad = torch.ones(2)
        adam.step()

    step()
    original = torch.distributed.all_reduce
    assert count(step, 3, on_gpu=False) == (2, 3, None)
    assert torch.distributed.all_reduce is original
    torch.distributed.destroy_process_group()


LAUNCHES = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel"]
NO_WAITS = ["cudaDeviceSynchronize", "aten::_local_scalar_dense", "cudaMemcpyAsync"]  # the profiler's; no waits


def test_waits_and_launches_are_those_of_the_runtime():
    assert tally([*LAUNCHES, *NO_WAITS, "cudaStreamSynchronize"]) == (1, 3)


def side(*starts, all_reduces=1):
    counts = {"all_reduces": all_reduces, "host_syncs": 2, "launches": None, "rank sets": 1}
    return Side([list(one) for one in starts], counts)


def test_a_ratio_is_that_of_what_was_measured_side_by_side():
    """The machine was slower in one turn, one step was held up, and one start came out otherwise."""
    ours, theirs = side((1, 10, 9), (3, 3, 90), (4, 4, 4)), side((2, 20, 2), (4, 4, 4), (4, 4, 4))
    assert ratio(ours, theirs) == {"median": 0.75, "least": 0.5, "largest": 1.0}
    assert ours.milliseconds == 4000.0


def test_a_row_says_what_it_misses():
    slow, fast = side((1.2,), all_reduces=2), side((1.0,))
    row = step_row("bf16", 2, "0.18.2", 2000, fast, slow, fast)
    assert row["misses"] == ["1.20 of native 0.19.2's time, not at most 1.00", "2 all-reduces for 1 sets of ranks"]
    assert step_row("bf16", 2, "0.18.2", 2000, slow, fast, slow)["misses"] == []
    alone = step_row("bf16", 2, "0.18.2", 2000, slow, fast)
    assert alone["patched / native"] is None and alone["unpatched / native"] is None
    assert startup.row("0.18.2", [10.0, 59.0, 90.0], False, [0.7, 0.2, 9.0])["misses"] == []
    assert startup.row("0.18.2", [60.0], True, [0.2, 1.2, 1.3])["misses"] == [
        "60.0 ms, not under 60",
        "it imports torch",
        "apply() takes 1.20 s, not under 1.2",
    ]


def test_the_import_row_is_measured_in_fresh_processes(monkeypatch, tmp_path):
    """By a Python that prints what it is told and counts its starts."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
echo "$MEGATRON_MTP_PATCHES$PYTHONDONTWRITEBYTECODE" >> {tmp_path}/starts
case "$4" in *apply*) echo a warning; echo 1.5;; *) echo 20.0 False;; esac
""")
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    row = startup.measure("0.18.2", str(python))
    assert (row["ms"], row["apply s"], row["loads torch"]) == (20.0, 1.5, False)
    assert (tmp_path / "starts").read_text().split() == 6 * ["all"] + 4 * ["none"]
    text = "\n".join(tables({"import": [row]})[0].lines())
    assert "| 0.18.2 | 20.0 | no | 1.50 | misses: apply() takes 1.50 s, not under 1.2 |" in text


def test_rows_that_were_not_measured_stay_in_the_file(tmp_path):
    def row(release, ms, ranks=1):
        return {"release": release, "ranks": ranks, "ms": ms}

    measured = {"about": {"device": "new", "versions": {"0.18.2": 2}}, "step": [row("0.18.2", 5), row("0.18.2", 6, 2)]}
    file = tmp_path / "cpu.json"
    assert results.update(file, measured) == measured
    before = {"about": {"device": "old", "versions": {"0.17.1": 1, "0.18.2": 1}}, "import": [row("0.18.2", 1)]}
    file.write_text(json.dumps({**before, "step": [row("0.17.1", 3), row("0.18.2", 4), row("0.19.2", 7)]}))
    assert results.update(file, measured) == {
        "about": {"device": "new", "versions": {"0.17.1": 1, "0.18.2": 2}},
        "import": [row("0.18.2", 1)],
        "step": [row("0.17.1", 3), row("0.18.2", 5), row("0.19.2", 7), row("0.18.2", 6, 2)],
    }


def test_the_table_says_what_native_differs_from_itself_by():
    native = side((1.0,), (1.0,), (1.0,))
    rows = [
        step_row("bf16", ranks, release, 2000, side(*((taken,) for taken in starts)), native, native)
        for ranks, release, starts in (
            (1, "0.18.2", (5.0, 5.0, 5.0)),
            (1, "0.19.2", (0.9, 0.98, 1.0)),
            (1, "0.19.2", (1.0, 1.02, 1.1)),
            (4, "0.19.2", (1.03, 1.03, 1.03)),
        )
    ]
    table = tables({"step": rows})[0]
    assert [row[-3:-1] for row in table.rows] == [["2,000", "3 x 1"]] * 4
    note = table.note
    assert "It took 0.98 to 1.02 of its time on 1 rank, 1.03 to 1.03 of its time on 4 ranks:" in note
    assert tables({"step": rows[:1]})[0].note == ""


@pytest.mark.parametrize("release", ["0.18.2", "0.19.2"])
def test_three_megatrons_take_turns_and_none_stands_for_two(monkeypatch, release):
    workers = []

    class Worker:
        def __init__(self, release, patches, ranks, options, log):
            self.seconds = (1.0, 2.0, 4.0)[len(workers) % 3]
            self.started_with, self.closed = (release, patches), False
            workers.append(self)

        def answer(self):
            return {"megatron-core": self.started_with[0]}

        def ask(self, case, count=None):
            return {"all_reduces": 1, "rank sets": 1} if count else self.seconds

        def close(self):
            self.closed = True

    monkeypatch.setattr(step, "Worker", Worker)
    options = argparse.Namespace(python=["0.18.2", "0.19.2"], parameters=16, starts=2, turns=3)
    measured = list(step.measure(release, 2, options, lambda text: None))
    versions, rows = measured[0][0], [row for _, row in measured]
    assert versions == {"megatron-core": release}
    sides = [(release, "none"), (release, "all"), ("0.19.2", "none")]
    assert [worker.started_with for worker in workers] == 2 * sides
    assert all(worker.closed for worker in workers)
    for row in rows:
        ratios = [row[pair]["median"] for pair in ("patched / unpatched", "patched / native", "unpatched / native")]
        assert ratios == [2.0, 0.5, 0.25]
        assert (row["parameters"], row["starts"], row["turns"]) == (16, 2, 3)


def test_one_read_is_half_a_copy():
    shape = {"tokens": 8, "vocabulary": 16, "hidden": 4}
    row = acceptance.row("0.18.2", "gpu", shape, [3.0], [2.0], [12.0])
    assert row["ratio"] == 3.0 and row["misses"] == ["3.00 times one read, not at most 1.5"]
    assert acceptance.row("0.18.2", "cpu", shape, [3.0], [2.0], [12.0])["misses"] == []
    text = "\n".join(tables({"acceptance": [row]})[0].lines())
    assert "| 8 | 16 | 4 | 3.00 | 0.250 | 3000.00 | 1000.00 | misses: 3.00 times one read, not at most 1.5 |" in text
