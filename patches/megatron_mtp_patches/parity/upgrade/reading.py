"""Reads a run's flags as one Megatron does, in a process that imports this Megatron, and keeps what they come to."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from dataclasses import asdict
from enum import Enum
from typing import Any, NamedTuple

from ...catalog import CATALOG
from ...doctor.findings import RunSettings, find_defects
from ...doctor.flags import read, refusals
from ...engine import UsageError
from ...engine.source import find_file
from ...megatron_engine import ENGINE
from ...megatrons.installed import describe_megatron
from ..trainer import import_trainer, prepare, silence
from .features import find_unused
from .trees import Tree

# The configurations that Megatron's trainer makes of its arguments, by what they configure.
CONFIGURATIONS = {
    "model": "megatron.core.transformer.transformer_config:MLATransformerConfig",
    "optimizer": "megatron.core.optimizer.optimizer_config:OptimizerConfig",
    "data parallelism": "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
}


class Reading(NamedTuple):
    """A run in one Megatron.

    Attributes:
        megatron: its release and its folder.
        transformer_engine: its version and where it is from.
        world_size: the number of ranks.
        findings: the known defects that affect the run, each as a `Finding`'s fields.
        unknown: the flags that Megatron does not know.
        settings: {name: (value in words, what it configures)}, after Megatron has set the defaults.
        unused: the names of those that belong to a feature that the run does not use.
        patches: {id: state}.
    """

    megatron: str
    transformer_engine: str
    world_size: int
    findings: list[dict[str, Any]]
    unknown: list[str]
    settings: dict[str, tuple[str, str]]
    unused: list[str]
    patches: dict[str, str]


def read_in(tree: Tree, flags: list[str], world_size: int | None) -> Reading:
    """Read the flags in this Megatron.

    Raises:
        UsageError: it refuses them.
        PatchError: it does not import.
    """
    return Reading(**json.loads(tree.call(f"{__name__}:read_here", (flags, world_size))))


def read_here(options: tuple[list[str], int | None]) -> bytes:
    """Read (flags, number of ranks) in the Megatron that this process imports; a `Reading` as JSON."""
    flags, world_size = options
    version, is_installed = prepare(world_size, None)
    import_trainer(version)
    with silence():
        line = read(flags, world_size)
    run, settings = RunSettings(line.sources, version), _describe_settings(line.sources)
    _check_spec(run)
    with refusals():
        findings = [asdict(one) for one in find_defects(run)]
    origin = "" if is_installed else " (not installed; this release was made for it)"
    reading = Reading(
        megatron=describe_megatron(),
        transformer_engine=f"TransformerEngine {version}{origin}" if version else "no TransformerEngine",
        world_size=line.world_size,
        findings=findings,
        unknown=line.unknown.names,
        settings=settings,
        unused=list(find_unused(settings, run)),
        patches={patch.id: str(ENGINE.report(patch).state) for patch in CATALOG},
    )
    return json.dumps(reading._asdict()).encode()


def _check_spec(run: Any) -> None:
    """Raise UsageError if the run, which then ends in an error, builds its layers by a module that Megatron lacks."""
    module = run.spec[0] if run.spec else ""
    if module.startswith("megatron.") and find_file(module) is None:  # a user's own may be on another path
        raise UsageError(f"--spec {module}: this Megatron has no such module")


def _describe_settings(sources: list[object]) -> dict[str, tuple[str, str]]:
    """Each argument, and each field of a configuration that no argument sets, with its default."""
    configured, values = {}, {}
    for part, target in CONFIGURATIONS.items():
        module, _, name = target.partition(":")
        for field in dataclasses.fields(getattr(importlib.import_module(module), name)):
            configured[field.name] = part
            if field.default_factory is not dataclasses.MISSING:
                values[field.name] = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                values[field.name] = field.default
    for source in sources:
        values |= vars(source)
    values.pop("megatron_mtp_patches", None)  # the record of the patches
    return {
        name: (_describe(value), configured.get(name, "trainer"))
        for name, value in values.items()
        if not name.startswith("_")
    }


def _describe(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
