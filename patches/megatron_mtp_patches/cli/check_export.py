"""`check-export FOLDER`: MTP heads and other tensors that an exported model of Hugging Face lacks or has wrong."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from . import CANNOT_RUN
from .console import make_printer

MOST_NAMES = 8  # of tensors that are printed with a problem


def check_export(folder: Path, base: Path | None) -> int:
    """Print what is wrong with an exported model, if there is something.

    `base` is the folder of the model that it was trained from.

    Returns 1 if there is something, 125 if safetensors or torch is missing, else 0.

    Raises:
        UsageError: a folder is none of a model with safetensors files, or a file is cut off.
    """
    show = make_printer()
    missing = [name for name in ("safetensors", "torch") if find_spec(name) is None]
    if missing:
        show(f"check-export needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return CANNOT_RUN
    from ..doctor.exports import Export, find_problems

    export, trained_from = Export(folder), Export(base) if base else None
    heads = export.find_heads()
    show(f"{folder}: {len(export.files)} tensors, of these {sum(map(len, heads.values()))} of {len(heads)} MTP heads")
    problems = find_problems(export, trained_from)
    for text, names in problems:
        rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        show(f"* {text}: {', '.join(names[:MOST_NAMES])}{rest}", "red")
    if not problems:
        heads_differ = ", no tensor of the base is gone, and no head is that of the base" if base else ""
        show(f"Nothing wrong was found: each declared head has tensors, all values are finite{heads_differ}.")
    return int(bool(problems))
