"""Rehearse Megatron-LM with no GPU: torch.cuda resolves to the CPU, NCCL to gloo.

`install()` lets the real, unmodified Megatron train, save and resume on 1 to N CPU ranks. The control flow,
the collectives and the checkpoints are Megatron's own; a rehearsal proves that a command line runs, and
shows what its losses do.

What it cannot be honest about: time, memory (every figure is 0), fp8, CUDA graphs, overlap (streams run in program
order) and torch.compile (nothing is compiled). Those are refused by name or left out, never imitated. A tensor "on
cuda" reports `device == cpu`. Where TransformerEngine's Python is installed, it runs, and its kernels are stood in for
in torch: see transformer_engine/.

Importing this package imports no torch. It needs torch >= 2.11, the first whose gloo averages (ReduceOp.AVG).
"""

from __future__ import annotations

import os
import socket
import sys

LOWEST_TORCH = (2, 11)
_done = False
_with_transformer_engine = False


def installed() -> bool:
    """Does torch.cuda resolve to the CPU in this process?"""
    return _done


def install(*, megatron_flags: bool = True) -> None:
    """Put the layers in, in order. They last for the life of the process; a second call adds Megatron's flags at most.

    A process that no launcher (torchrun) has given a rank is rank 0 of one.
    `megatron_flags=False` leaves the defaults of Megatron's command line alone, which its unit tests expect.

    The defaults and refusals of Megatron's command line are a base patch, which no choice of patches leaves out.
    `megatron_mtp_patches.revert()` takes them out with every other patch, `apply()` puts them back; in between the
    rehearsal is one with `megatron_flags=False`. The other layers stay.
    """
    if not _done:
        _install_layers()
    if megatron_flags:
        from . import megatron_flags as flags

        flags.install()


def with_transformer_engine() -> bool:
    """Does TransformerEngine's own Python run in this rehearsal? See transformer_engine/."""
    return _with_transformer_engine


def _install_layers() -> None:
    global _done, _with_transformer_engine
    from . import transformer_engine

    _with_transformer_engine = transformer_engine.available()
    if _with_transformer_engine:
        transformer_engine.prepare()
    _prepare_torch()
    if "RANK" not in os.environ:
        _be_the_only_rank()
    from . import children, collectives, compile, cuda, dispatcher, fallbacks, rng, tensor

    for layer in (dispatcher, tensor, cuda, rng, collectives, compile, children, fallbacks):
        layer.install()
    if _with_transformer_engine:
        transformer_engine.install()
    _done = True


def close() -> None:
    """Close the process group of a script that has ended well: gloo's threads must not outlive what they use."""
    distributed = sys.modules["torch"].distributed
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _be_the_only_rank() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)


def _prepare_torch() -> None:
    """Import torch so that it finds neither a GPU nor dynamo, or say why that is no longer possible."""
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "rehearsal.install() came after `import megatron`, which keeps its own copies of torch names: "
            "call it before anything imports Megatron."
        )
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError("rehearsal.install() came after CUDA was initialised: call it in a fresh process.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU in this machine must stay out of it
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is imported
    import torch

    if torch.__version__ < LOWEST_TORCH:
        raise RuntimeError(
            f"a rehearsal needs torch >= {'.'.join(map(str, LOWEST_TORCH))} (gloo with ReduceOp.AVG); "
            f"this is torch {torch.__version__}."
        )
    # torch.optim imports dynamo anyway; dynamo inspects torch.cuda at import and must still find the original
    import torch._dynamo

    torch._dynamo.config.disable = True  # it may have been imported before the variable was set
