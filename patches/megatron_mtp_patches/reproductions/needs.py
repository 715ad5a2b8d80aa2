"""What a program needs beside megatron.core, and what to do where it is missing."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from ..rehearsal import transformer_engine

TRANSFORMER_ENGINE = "transformer-engine"
TRAINER = "megatron.training"
MODULES = {"emerging-optimizers": "emerging_optimizers", "einops": "einops", TRAINER: TRAINER}


def needs_of(program: ModuleType) -> tuple[str, ...]:
    """The packages that a program needs, by the names of pip, or Megatron's trainer by the name of its package."""
    return getattr(program, "NEEDS", ())


def find_missing(program: ModuleType) -> str:
    """Which packages a program needs and this environment lacks, and what to do about each; '' if it has all."""
    return "; ".join(f"it needs {package}: {_advice(package)}" for package in needs_of(program) if _is_missing(package))


def _is_missing(package: str) -> bool:
    if package == TRANSFORMER_ENGINE:
        return not transformer_engine.available()
    return find_spec(MODULES[package]) is None


def _advice(package: str) -> str:
    if package == TRANSFORMER_ENGINE:
        return transformer_engine.installation_advice()
    if package == TRAINER:
        return "this Megatron has no trainer; put a checkout of the same release first on PYTHONPATH"
    return f"pip install {package}"
