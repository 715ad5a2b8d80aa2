"""Ask a process that a rehearsal spawns what it has. This file imports no patches."""

import importlib
import multiprocessing
import sys
from typing import Any

NAMES = {"torch", "transformer_engine_torch", "megatron_mtp_patches"}


def ask(module: str) -> tuple[list[str], list[str], str]:
    """Which of NAMES it has imported before it imports `module`, and after; and where its tensors "on cuda" are."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=report, args=(its, module))
    process.start()
    its.close()  # so that recv() ends if the process dies
    answer = mine.recv()
    process.join()
    return answer


def report(pipe: Any, module: str) -> None:
    before = sorted(NAMES & sys.modules.keys())
    importlib.import_module(module)
    import torch.nn.functional

    assert torch.__spec__.submodule_search_locations
    pipe.send((before, sorted(NAMES & sys.modules.keys()), str(torch.empty(1, device="cuda").device)))
