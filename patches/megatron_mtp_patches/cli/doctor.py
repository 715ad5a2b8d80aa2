"""`doctor`: what this environment has, and what each missing part costs."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from ..engine.source import find_file
from .megatron import describe_megatron

# distribution, module, whether training is impossible without it, what is lost without it
PARTS = (
    ("torch", "torch", True, "nothing runs"),
    ("megatron-core", "megatron.core", True, "there is nothing to patch"),
    ("triton", "triton", False, "megatron-core >= 0.18 does not import"),
    ("transformer-engine", "transformer_engine", False, "no fp8, no fused Adam, so no precision-aware optimizer"),
    ("apex", "apex", False, "no fused layer norm for --transformer-impl local, so no sequence parallel there"),
    ("emerging-optimizers", "emerging_optimizers", False, "no Muon, SOAP or Lion"),
    ("einops", "einops", False, "no Megatron-FSDP"),
    ("nvidia-modelopt", "modelopt", False, "no distillation or quantization-aware training"),
    ("tensorboard", "tensorboard", False, "--tensorboard-dir writes nothing"),
    ("wandb", "wandb", False, "--wandb-project fails"),
)


def examine() -> int:
    """Print the table; 1 if training is impossible."""
    console = Console(highlight=False)
    console.print(f"Python {platform.python_version()} in {sys.prefix}\n{describe_megatron()}", soft_wrap=True)
    table = Table("part", "version", "without it")
    impossible = False
    for distribution, module, needed, cost in PARTS:
        found = _find(distribution, module)
        impossible |= needed and found is None
        style = "red" if needed else "yellow"
        table.add_row(distribution, found or f"[{style}]missing[/]", "" if found else cost)
    table.add_row("GPU", *_find_gpu())
    console.print(table)
    return int(impossible)


def _find(distribution: str, module: str) -> str | None:
    if module == "megatron.core":
        present = find_file(module) is not None
    else:
        present = importlib.util.find_spec(module) is not None
    if not present:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "present, version unknown"


def _find_gpu() -> tuple[str, str]:
    try:
        import torch
    except ImportError:
        return "[yellow]unknown[/]", "torch is needed to look"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), ""
    return "[yellow]none[/]", "training needs `run --device cpu` (a rehearsal)"
