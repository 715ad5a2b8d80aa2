"""Rehearse Megatron-LM without a GPU: torch.cuda resolves to the CPU, and NCCL to gloo.

`install()` lets the real, unmodified Megatron train, save and resume on 1 to N CPU ranks. The control flow, the
collectives and the checkpoints are Megatron's own. A rehearsal proves that a command line runs, and shows how its
losses develop.

A CPU says nothing about time, memory (every figure is 0), fp8, CUDA graphs, overlap (streams run in program order)
and torch.compile (nothing is compiled). The rehearsal refuses these with an error that names them, or leaves them out;
it never imitates them. A tensor "on cuda" reports `device == cpu`. If TransformerEngine's Python is installed, it runs,
with its kernels replaced by stand-ins in torch: see transformer_engine/.

Importing this package does not import torch. A rehearsal needs torch >= 2.11, the first release whose gloo averages
(ReduceOp.AVG).
"""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec

from ..engine import PatchError
from ..megatrons.environment import LOWEST_TORCH

_LOWEST = ".".join(map(str, LOWEST_TORCH))
_is_installed = False
_with_transformer_engine = False


def installed() -> bool:
    """True if torch.cuda resolves to the CPU in this process."""
    return _is_installed


def install(*, megatron_flags: bool = True) -> None:
    """Install the layers, in order. They stay as long as the process; a second call can only add Megatron's flags.

    A process to which no launcher (torchrun) has given a rank becomes rank 0 of one rank.
    `megatron_flags=False` does not change the defaults of Megatron's command line; its unit tests expect them.

    The defaults and refusals of Megatron's command line are a base patch: the user's choice of patches does not affect
    it. `megatron_mtp_patches.revert()` removes it with every other patch and `apply()` installs it again; in between
    the rehearsal behaves as with `megatron_flags=False`. The other layers stay.
    """
    if not _is_installed:
        _install_layers()
    if megatron_flags:
        from . import megatron_flags as flags

        flags.install()


def with_transformer_engine() -> bool:
    """True if TransformerEngine's own Python runs in this rehearsal; see transformer_engine/."""
    return _with_transformer_engine


def _install_layers() -> None:
    global _is_installed, _with_transformer_engine
    from . import transformer_engine

    _with_transformer_engine = transformer_engine.available()
    if _with_transformer_engine:
        transformer_engine.prepare()
    _prepare_torch()
    if "RANK" not in os.environ:
        _set_environment_of_one_rank()
    from . import bfloat16, children, collectives, compile, cuda, dispatcher, fallbacks, rng, tensor

    for layer in (dispatcher, bfloat16, tensor, cuda, rng, collectives, compile, children, fallbacks):
        layer.install()
    if _with_transformer_engine:
        transformer_engine.install()
    _is_installed = True


def close() -> None:
    """Close the process group of a script that ended well: gloo's threads must not outlive the objects they use."""
    distributed = sys.modules["torch"].distributed
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _set_environment_of_one_rank() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**one_rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)


def _prepare_torch() -> None:
    """Import torch so that it finds neither a GPU nor dynamo. Raise PatchError if it cannot."""
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise PatchError(
            f"a rehearsal needs torch >= {_LOWEST}, and there is none in {sys.prefix}: pip install 'torch>={_LOWEST}'"
        )
    if "megatron.core" in sys.modules:
        raise PatchError(
            "rehearsal.install() came after `import megatron`, which keeps its own copies of torch names: "
            "call it before anything imports Megatron."
        )
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise PatchError("rehearsal.install() came after CUDA was initialised: call it in a fresh process.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides a GPU of this machine
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is imported
    import torch

    if torch.__version__ < LOWEST_TORCH:
        raise PatchError(
            f"a rehearsal needs torch >= {_LOWEST} (gloo with ReduceOp.AVG); this is torch {torch.__version__}."
        )
    # torch.optim imports dynamo anyway; dynamo inspects torch.cuda at import and must see the original
    import torch._dynamo

    torch._dynamo.config.disable = True  # dynamo may have been imported before the variable was set
