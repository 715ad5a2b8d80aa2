"""The end of a standalone file, which runs its program: on GPUs, or on the CPU where Megatron asks for none."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from .runner import is_same


def main(
    reproduce: Callable[[], tuple[Any, Any]], ranks: int, needs_gpus: bool, otherwise: str, needs_apex: bool = False
) -> None:
    """Run a program on each rank, print what it expects and what it sees, and end with 1 where they differ.

    Without a GPU for each rank, or without Apex's CUDA extension, it ends with 125, if it needs them.

    An error is what is seen in place of `otherwise`.
    """
    if needs_apex:
        try:
            importlib.import_module("fused_weight_gradient_mlp_cuda")
        except ImportError as error:  # of which Megatron's ColumnParallelLinear would make a RuntimeError
            print(f"This needs NVIDIA's Apex, installed with its CUDA extensions: {error}.", file=sys.stderr)
            sys.exit(125)  # by which `git bisect run` knows that nothing was tested
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        if needs_gpus:
            print(f"This needs a GPU for each of its ranks, {ranks} in all. There are {gpus}.", file=sys.stderr)
            sys.exit(125)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    outcomes = torch.multiprocessing.get_context("spawn").SimpleQueue()
    try:
        torch.multiprocessing.spawn(be_rank, (reproduce, gpus >= ranks, outcomes), ranks)
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        print(error, file=sys.stderr)
        right, expected, seen = False, otherwise, str(error).strip().rpartition("\n")[2]
    else:
        right, expected, seen = min((outcomes.get() for _ in range(ranks)), key=lambda outcome: outcome[0])
    print(f"expected  {expected}\nseen      {seen}")
    sys.exit(0 if right else 1)


def be_rank(rank: int, reproduce: Callable[[], tuple[Any, Any]], on_gpu: bool, outcomes: Any) -> None:
    """Run the program on this rank, and report whether it is right, what it expects and what it sees."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    expected, seen = reproduce()
    outcomes.put((is_same(expected, seen), expected, seen))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
