"""A rank that dies or stops in mid-step: the other ends by itself with an error, and no checkpoint is damaged."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from scripts.common.forks import fork, kill, wait
from scripts.common.process import free_port
from tests.warm.processes import LIMIT, Ended, be_rank

pytestmark = pytest.mark.forked("patched")

SAVED_AFTER, LAST = 2, 4  # steps
TIMEOUT = 5.0  # seconds, of the process groups of a rank that waits for one that has stopped
CONNECTION = r"(?i)gloo|connection|timed out|peer"  # what an error names


class Training:
    """This rank's part of the training, with its checkpoint in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=LIMIT / 60)
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16(),
        )
        settings = {"clip_grad": 1.0, "grad_norm_skip_threshold": 1e6, "bf16": True, "params_dtype": torch.bfloat16}
        config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, **settings)
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.step_number = 0

    def run(self, until: int) -> None:
        """Train up to this step, saving a checkpoint if the training passes the second one."""
        while self.step_number < until:
            self.step()
            if self.step_number == SAVED_AFTER:
                torch.save(self.model.state_dict(), self._part("model"))
                torch.save(self.optimizer.state_dict(), self._part("optimizer"))
                self.optimizer.save_parameter_state(str(self.folder / "moments.pt"))
                dist.barrier()

    def step(self) -> None:
        for buffer in self.model.buffers:
            buffer.grad_data.copy_(torch.linspace(-1.0, self.step_number + 1, buffer.grad_data.numel()))
        self.optimizer.step()
        self.step_number += 1

    def wait_at_most(self, seconds: float) -> None:
        """From now on, for the other rank. As long as both run, it may be slower than that."""
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def copy_parameters(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}{dist.get_rank()}.pt"


def digest(folder: Path) -> dict[str, str]:
    """The files of the checkpoint in `folder`, each with a hash of what it holds."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.pt"))}


def run_pair(rank_0: Callable[[], object], rank_1: Callable[[], object]) -> Ended:
    """Run both as forked ranks until rank 0 has ended, then kill what is left; how rank 0 ended.

    Its code is None where it had to be killed too, after a limit that only hanging ranks reach.
    """
    port = free_port()

    def start(rank: int) -> None:
        be_rank(rank, 2, port)
        (rank_0, rank_1)[rank]()

    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(2)]
        first, second = (fork(lambda rank=rank: start(rank), log) for rank, log in enumerate(logs))
        codes = wait([first], time.monotonic() + LIMIT * 0.8)
        kill(second)
        os.waitpid(second, 0)
        return Ended(codes[first], "".join(log.read_text(errors="replace") for log in logs))


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
