"""The script that a run starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..engine import UsageError
from ..megatrons.installed import describe_megatron

SCRIPT, HYBRID_SCRIPTS = "pretrain_gpt.py", ("pretrain_hybrid.py", "pretrain_mamba.py")


def find_script(own: str, words: list[str], chosen: str | None) -> str:
    """The file to start: the `chosen` one, or one of the name of the run's `own`, here or beside Megatron.

    Where the run has none ('') it is Megatron-LM's, for a hybrid model if its flags have a pattern of layers.

    Raises:
        UsageError: there is no such file.
    """
    if chosen is not None:
        if not Path(chosen).is_file():
            raise UsageError(f"no such script: {chosen}")
        return chosen
    megatron = importlib.util.find_spec("megatron.core")
    roots = [Path.cwd(), *([Path(str(megatron.origin)).parents[2]] if megatron and megatron.origin else [])]
    is_hybrid = any(word.startswith(("--hybrid-layer-pattern", "--hybrid-override-pattern")) for word in words)
    names = [Path(own).name] if own else [*HYBRID_SCRIPTS] if is_hybrid else [SCRIPT]
    for root in roots:
        for name in names:
            if (root / name).is_file():
                return str(root / name)
    raise UsageError(
        f"parity trains with Megatron-LM's {names[0]}, which no wheel has, and there is none here or beside "
        f"{describe_megatron()}: run it in a checkout, or name the script of the run with --script"
    )
