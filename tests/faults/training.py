"""A training on two ranks that saves a checkpoint after its second step, and pairs of forked ranks to run it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from scripts.common.forks import fork, kill, wait
from scripts.common.process import free_port
from tests.warm.processes import LIMIT, Ended, be_rank

SAVED_AFTER, LAST = 2, 4


class Training:
    """This rank's part of the training, from the checkpoint in `folder` if one is there."""

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
        self.norms: dict[int, float] = {}
        self.step_number = 0
        if self._part("model").exists():
            self.model.load_state_dict(torch.load(self._part("model"), weights_only=False))
            self.optimizer.load_state_dict(torch.load(self._part("optimizer"), weights_only=False))
            self.optimizer.load_parameter_state(str(folder / "moments.pt"))
            self.step_number = SAVED_AFTER

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
        _, norm, _ = self.optimizer.step()
        self.step_number += 1
        self.norms[self.step_number] = float(norm)

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
