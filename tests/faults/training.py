"""Pairs of ranks over gloo, one of which is killed, or stops, in the middle of an optimizer step."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import megatron_mtp_patches.rehearsal.pytest_plugin  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

TIMEOUT = 10  # seconds; of every process group
SAVED_AFTER, LAST = 2, 4


def look() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        straight = run_pair(Path(folder, "straight"))
        broken = {
            "killed before the norms": run_pair(Path(folder, "norms"), "norms", signal.SIGKILL),
            "killed in the update": run_pair(Path(folder, "update"), "update", signal.SIGKILL),
            "stopped before the norms": run_pair(Path(folder, "stopped"), "norms", signal.SIGSTOP),
        }
        return {
            "timeout": TIMEOUT,
            "straight": straight,
            "broken": broken,
            "resumed": run_pair(Path(folder, "norms")),
        }


def run_pair(folder: Path, place: str = "", how: int = 0) -> dict:
    folder.mkdir(exist_ok=True)
    for name in ("rendezvous", "rank0.json", "rank1.json"):
        (folder / name).unlink(missing_ok=True)
    start = time.monotonic()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be_rank, args=(rank, folder, place, how)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(TIMEOUT * 6)
    hung = ranks[0].is_alive()
    if hung or place:
        for process in ranks:
            process.kill()
    for process in ranks:
        process.join()
    reports = [json.loads(path.read_text()) if path.exists() else {} for path in sorted(folder.glob("rank?.json"))]
    return {
        "hung": hung,
        "seconds": time.monotonic() - start,
        "rank 0": reports[0] if reports else {},
        "checkpoint": digest(folder),
    }


def digest(folder: Path) -> dict:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.pt"))}


def be_rank(rank: int, folder: Path, place: str, how: int) -> None:
    report: dict = {"norms": {}, "error": "", "untouched": None}
    try:
        train(rank, folder, place, how, report)
    except BaseException:
        report["failed"] = traceback.format_exc()
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


def train(rank: int, folder: Path, place: str, how: int, report: dict) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
    )
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=TIMEOUT / 60)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16(),
    )
    settings = {"clip_grad": 1.0, "grad_norm_skip_threshold": 1e6, "bf16": True, "params_dtype": torch.bfloat16}
    config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, **settings)
    optimizer = get_megatron_optimizer(config, [model])
    parts = {"model": folder / f"model{rank}.pt", "optimizer": folder / f"optimizer{rank}.pt"}
    moments = str(folder / "moments.pt")
    first = 1
    if parts["model"].exists():
        model.load_state_dict(torch.load(parts["model"], weights_only=False))
        optimizer.load_state_dict(torch.load(parts["optimizer"], weights_only=False))
        optimizer.load_parameter_state(moments)
        first = SAVED_AFTER + 1
    for step in range(first, LAST + 1):
        for buffer in model.buffers:
            buffer.grad_data.copy_(torch.linspace(-1.0, step, buffer.grad_data.numel()))
        if place and step == LAST and rank == 1:
            die_in(place, how, optimizer)
        before = [param.detach().clone() for param in model.parameters()]
        start = time.monotonic()
        try:
            _, norm, _ = optimizer.step()
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
            report["where"] = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            report["waited"] = time.monotonic() - start
            same = zip(before, model.parameters(), strict=True)
            report["untouched"] = all(torch.equal(old, new) for old, new in same)
            return
        report["norms"][step] = float(norm)
        if step == SAVED_AFTER and first == 1:
            torch.save(model.state_dict(), parts["model"])
            torch.save(optimizer.state_dict(), parts["optimizer"])
            optimizer.save_parameter_state(moments)
            dist.barrier()
            report["saved"] = digest(folder)
    report["weights"] = float(sum(param.double().sum() for param in model.parameters()))
    dist.barrier()


def die_in(place: str, how: int, optimizer) -> None:
    """End this rank, or stop it, where it would reduce the norms or update its part of the parameters."""

    def die(*args, **kwargs):
        os.kill(os.getpid(), how)

    if place == "norms":
        dist.all_reduce = die
    else:
        optimizer.chained_optimizers[0].optimizer.step = die


if __name__ == "__main__":
    print(json.dumps({"killed_ranks": look()}))
