"""A rank that dies or stops in mid-step: the other ends by itself with an error, and no checkpoint is damaged."""

from __future__ import annotations

import os
import signal
import traceback

import pytest
import torch
import torch.distributed as dist

from tests.warm.processes import LIMIT

from .training import LAST, SAVED_AFTER, Training, digest, run_pair

pytestmark = pytest.mark.forked("patched")

TIMEOUT = 5.0  # seconds, of the process groups of a rank that waits for one that has stopped
CONNECTION = r"(?i)gloo|connection|timed out|peer"  # what an error names


def before_the_norms(training, die):
    dist.all_reduce = die


def in_the_update(training, die):
    training.optimizer.chained_optimizers[0].optimizer.step = die


KILLED = (signal.SIGKILL, LIMIT)  # the end of the connection tells the other rank, before any timeout
STOPPED = (signal.SIGSTOP, TIMEOUT)


def end_in_the_last_step(folder, place, how):
    """Be the rank that is killed or stopped, by this signal."""
    training = Training(folder)
    training.run(LAST - 1)
    place(training, lambda *args, **kwargs: os.kill(os.getpid(), how))
    training.step()


@pytest.mark.parametrize(
    "place, ending",
    [(before_the_norms, KILLED), (in_the_update, KILLED), (before_the_norms, STOPPED)],
    ids=["killed before the norms", "killed in the update", "stopped before the norms"],
)
def test_the_survivor_ends_with_an_error_and_the_checkpoint_is_whole(place, ending, tmp_path):
    """A step whose norms were not reduced has updated nothing."""
    how, timeout = ending

    def survive():
        training = Training(tmp_path)
        training.run(SAVED_AFTER)
        saved = digest(tmp_path)
        assert len(saved) == 5
        training.run(LAST - 1)
        training.wait_at_most(timeout)
        before = training.copy_parameters()
        with pytest.raises(RuntimeError, match=CONNECTION) as raised:
            training.step()
        assert digest(tmp_path) == saved
        if place is before_the_norms:
            assert {"step_norms", "_reduce", "all_reduce"} <= {frame.name for frame in traceback.extract_tb(raised.tb)}
            assert all(map(torch.equal, before, training.model.parameters()))

    survivor = run_pair(survive, lambda: end_in_the_last_step(tmp_path, place, how))
    assert survivor.code == 0, survivor.output


def test_a_run_resumed_from_the_checkpoint_equals_the_uninterrupted_run(tmp_path):
    straight_folder, broken_folder = tmp_path / "straight", tmp_path / "broken"
    straight_folder.mkdir()
    broken_folder.mkdir()

    def run_straight():
        straight = Training(straight_folder)
        straight.run(LAST)
        assert list(straight.norms) == [1, 2, 3, 4]
        torch.save((straight.norms, straight.copy_parameters()), tmp_path / f"straight{dist.get_rank()}")
        dist.barrier()

    def survive():
        training = Training(broken_folder)
        training.run(LAST - 1)
        with pytest.raises(RuntimeError):
            training.step()

    def resume():
        resumed = Training(broken_folder)
        resumed.run(LAST)
        norms, parameters = torch.load(tmp_path / f"straight{dist.get_rank()}")
        assert resumed.norms == {step: norm for step, norm in norms.items() if step > SAVED_AFTER}
        assert all(map(torch.equal, parameters, resumed.model.parameters()))
        dist.barrier()

    for rank_0, rank_1 in [
        (run_straight, run_straight),
        (survive, lambda: end_in_the_last_step(broken_folder, before_the_norms, signal.SIGKILL)),
        (resume, resume),
    ]:
        ended = run_pair(rank_0, rank_1)
        assert ended.code == 0, ended.output
