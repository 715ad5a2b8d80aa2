"""`doctor`: what this environment has, and what each missing or unfitting part costs."""

from __future__ import annotations

import importlib.util
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from ..engine.fingerprints import KnownSources
from ..megatron_engine import ENGINE
from ..megatrons.environment import IMPORTS_OF_TRANSFORMER_ENGINE, PARTS, Limit, Part, find_version
from ..megatrons.installed import PACKAGES, describe_megatron, find_releases
from ..megatrons.known import since
from .console import make_console
from .zero_touch import describe_zero_touch


@dataclass(frozen=True)
class Framework:
    """A package that has patches of its own, and the parts that it imports; without it, `doctor` says nothing of it."""

    package: str
    module: str
    beside: tuple[Part, ...] = ()


_TESTED = "the tests run Megatron-Bridge"
FRAMEWORKS = (
    Framework(
        "Megatron-Bridge",
        "megatron.bridge",
        beside=(
            Part(
                "nvidia-resiliency-ext",
                "nvidia_resiliency_ext",
                "the trainers of Megatron-Bridge do not import; a rehearsal needs no more than tests/stand_ins/nvrx on "
                "PYTHONPATH, of a clone of the patches",
            ),
            Part(
                "transformers",
                "transformers",
                "Megatron-Bridge does not import",
                limits=(
                    Limit(f"{_TESTED} with transformers>=5.0,<=5.12.1", (5, 0), (5, 12, 2)),
                    Limit(f"{_TESTED} 0.6.2 with transformers>=5.8,<=5.12.1", (5, 8), megatron=since("0.19")),
                ),
            ),
        ),
    ),
    Framework("verl", "verl", beside=(Part("ray", "ray", "main_ppo has no workers"),)),
    Framework("ms-swift", "swift"),
    Framework("mcore-bridge", "mcore_bridge"),
)


def examine() -> int:
    """Print the table; 1 if training is impossible."""
    console = make_console()
    console.print(f"Python {platform.python_version()} in {sys.prefix}\n{describe_megatron()}", soft_wrap=True)
    console.print(f"zero-touch: {describe_zero_touch()}", soft_wrap=True)
    megatron = find_releases()
    table = Table("part", "version", "what that costs")
    is_impossible = False
    for part in PARTS:
        installed = find_version(part.distribution, part.module)
        is_needed = part.is_needed or bool(megatron.intersection(part.needed_by))
        is_impossible |= is_needed and installed is None
        table.add_row(part.distribution, *_judge(part, installed, is_needed, megatron))
    for framework in FRAMEWORKS:
        if installed := find_version(framework.package, framework.module):
            table.add_row(framework.package, *_judge_framework(framework, installed))
            for part in framework.beside:
                table.add_row(
                    part.distribution, *_judge(part, find_version(part.distribution, part.module), False, megatron)
                )
    table.add_row("GPU", *_find_gpu())
    console.print(table)
    return int(is_impossible)


def _judge(part: Part, installed: str | None, is_needed: bool, megatron: frozenset[str]) -> tuple[str, str]:
    """Return the version of the part, and what is lost with it."""
    if installed is None:
        fits = [f"{name} was made for {part.made_for[name]}" for name in sorted(megatron & part.made_for.keys())]
        return f"[{'red' if is_needed else 'yellow'}]missing[/]", "; ".join([part.cost, *fits])
    costs = [limit.cost for limit in part.broken_limits(installed, megatron)]
    imports = [module for place in ("", *sorted(megatron)) for module in part.imports.get(place, ())]
    names = PACKAGES | IMPORTS_OF_TRANSFORMER_ENGINE
    absent = [names.get(module, module) for module in imports if importlib.util.find_spec(module) is None]
    costs += [f"does not import without {' and '.join(absent)}: {part.cost}"] if absent else []
    return f"[yellow]{installed}[/]" if costs else installed, "; ".join(costs)


def _judge_framework(framework: Framework, installed: str) -> tuple[str, str]:
    """Return the version of the framework and, if it is none that the tests run, what that costs."""
    releases = KnownSources.read(Path(ENGINE.table_file)).package_releases(framework.package)
    tested = [release.removeprefix(f"{framework.package} ") for release in releases]
    if installed in tested:
        return installed, ""
    cost = f"the tests run {' and '.join(tested)}; `megatron-mtp-patches status` says which patches fit this version"
    return f"[yellow]{installed}[/]", cost


def _find_gpu() -> tuple[str, str]:
    try:
        import torch
    except ImportError:
        return "[yellow]unknown[/]", "torch is needed to look"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), ""
    return "[yellow]none[/]", "training needs `run --device cpu` (a rehearsal)"
