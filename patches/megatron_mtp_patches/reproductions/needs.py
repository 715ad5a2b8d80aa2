"""The packages that a program needs beside megatron.core, and advice where one is missing."""

from __future__ import annotations

from types import ModuleType

from packaging.requirements import Requirement  # Megatron also needs it

from ..megatrons.environment import PARTS, find_version
from ..megatrons.installed import find_releases
from ..rehearsal import transformer_engine

TRANSFORMER_ENGINE = "transformer-engine"
TRAINER = "megatron.training"
MUON = "Muon"  # Megatron's, which was written for some versions of emerging-optimizers
APEX = "Apex"  # NVIDIA's, with the CUDA extension that fuses weight gradients
PARTS_BY_NAME = {part.distribution: part for part in PARTS}
PARTS_BY_NAME[MUON] = PARTS_BY_NAME["emerging-optimizers"]


def needs_of(program: ModuleType) -> tuple[str, ...]:
    """What a program needs: packages as pip takes them, Apex, and of Megatron its trainer or Muon."""
    return getattr(program, "NEEDS", ())


def assumption_of(program: ModuleType) -> str:
    """The behaviour of a kernel that a program takes for granted, as "the kernel does this"; '' for none.

    The program or the rehearsal replaces this kernel by something that behaves so, and what is seen follows from it.
    """
    return getattr(program, "ASSUMES", "")


def find_missing(program: ModuleType) -> str:
    """Name what a program needs and this environment lacks, and what to do about each; '' if it has all."""
    reasons = {need: _missing_reason(Requirement(need)) for need in needs_of(program)}
    return "; ".join(f"it needs {need}: {reason}" for need, reason in reasons.items() if reason)


def _missing_reason(need: Requirement) -> str:
    """Say why the program cannot have what it needs, and what to do about it; '' if it can."""
    if need.name == APEX:
        return ""  # its stand-in comes with those of TransformerEngine, which such a program also needs
    part = PARTS_BY_NAME[need.name]
    installed = find_version(part.distribution, part.module)
    if need.name == TRANSFORMER_ENGINE and not transformer_engine.available():
        return transformer_engine.installation_advice()
    if need.name == TRAINER and installed is None:
        return "this Megatron has no trainer; put a checkout of the same release first on PYTHONPATH"
    if installed is None:
        return f"pip install {part.distribution}{need.specifier}"
    if need.specifier and not need.specifier.contains(installed, prereleases=True):
        return f"{installed} is installed"
    if need.name == MUON and (broken := part.broken_limits(installed, find_releases())):
        return f"{part.distribution} {installed} is installed, and there is {broken[0].cost}"
    return ""
