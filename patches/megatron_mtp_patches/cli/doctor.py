"""`doctor`: what this environment has, and what each missing or unfitting part costs."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from .. import _engine
from ..engine.fingerprints import KnownSources
from ..engine.source import find_file
from ..installed_megatron import PACKAGES, describe_megatron, find_releases
from ..megatrons import TRANSFORMER_ENGINE, since
from ..rehearsal import LOWEST_TORCH
from ..rehearsal.transformer_engine import NEEDED
from .console import make_console
from .zero_touch import describe_zero_touch


@dataclass(frozen=True)
class Limit:
    """What is lost with a version below `lowest`, or from `first_unfit` on; `megatron`: only with these releases."""

    cost: str
    lowest: tuple[int, ...] = ()
    first_unfit: tuple[int, ...] | None = None
    megatron: tuple[str, ...] = ()

    def is_broken_by(self, release: tuple[int, ...], megatron: frozenset[str]) -> bool:
        if self.megatron and not megatron.intersection(self.megatron):
            return False
        return release < self.lowest or (self.first_unfit is not None and release >= self.first_unfit)


@dataclass(frozen=True)
class Part:
    """A package, and what is lost without it: all training if `needed`, or with a Megatron that it is `needed_by`.

    `imports` are modules that it imports, with this Megatron or (under "") any, and whose packages it does not ask for.
    `made_for` has the version that each Megatron was made for.
    """

    distribution: str
    module: str
    cost: str
    needed: bool = False
    needed_by: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    imports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    made_for: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part(
        "torch",
        "torch",
        "nothing runs",
        needed=True,
        limits=(Limit("no rehearsal: `run --device cpu` needs torch >= 2.11", LOWEST_TORCH),),
    ),
    Part("megatron-core", "megatron.core", "there is nothing to patch", needed=True),
    Part("packaging", "packaging", "megatron-core does not import", needed=True),
    Part(
        "megatron.training",
        "megatron.training",
        "no pretrain() and no flags: set config fields instead",
        imports={"0.16.1": ("pydantic", "regex", "six", "triton", "yaml"), "0.17.1": ("yaml",), "0.18.2": ("yaml",)},
    ),
    Part(
        "wrapt",
        "wrapt",
        "no patch can be installed",
        needed=True,
        limits=(Limit("older than the patches are written for: wrapt >= 1.16", (1, 16)),),
    ),
    Part("triton", "triton", "megatron-core >= 0.18 does not import", needed_by=since("0.18")),
    Part(
        "transformer-engine",
        "transformer_engine",
        "no fp8, no fused Adam, so no precision-aware optimizer",
        limits=(
            Limit(
                "Megatron's multi-tensor kernels are left out in silence: megatron-core >= 0.17 takes all or none of "
                "them, and multi_tensor_scale_tensor is in transformer-engine >= 2.14",
                (2, 14),
                megatron=since("0.17"),
            ),
        ),
        imports={"": tuple(NEEDED)},
        made_for=TRANSFORMER_ENGINE,
    ),
    Part(
        "transformer-engine-torch",
        "transformer_engine_torch",
        "no kernels of TransformerEngine: its Python runs in a rehearsal only",
    ),
    Part("apex", "apex", "no fused layer norm for --transformer-impl local, so no sequence parallel there"),
    Part(
        "emerging-optimizers",
        "emerging_optimizers",
        "no Muon, SOAP or Lion",
        limits=(
            Limit("no Muon: megatron-core 0.16 was written for 0.1.0", first_unfit=(0, 2), megatron=("0.16.1",)),
            Limit("no Muon: megatron-core >= 0.18 was written for >= 0.2.0", (0, 2), megatron=since("0.18")),
        ),
    ),
    Part("einops", "einops", "no Megatron-FSDP"),
    Part(
        "pybind11", "pybind11", "a checkout cannot compile its dataset helpers, which pretrain_gpt.py does at its start"
    ),
    Part("psutil", "psutil", "no checkpoint can be saved in the format torch_dist, Megatron's default"),
    Part(
        "nvidia-modelopt",
        "modelopt",
        "no distillation or quantization-aware training",
        imports={"": ("huggingface_hub", "requests")},
    ),
    Part("tensorboard", "tensorboard", "--tensorboard-dir writes nothing"),
    Part("wandb", "wandb", "--wandb-project fails"),
)


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
    impossible = False
    for part in PARTS:
        installed = _find(part.distribution, part.module)
        needed = part.needed or bool(megatron.intersection(part.needed_by))
        impossible |= needed and installed is None
        table.add_row(part.distribution, *_judge(part, installed, needed, megatron))
    for framework in FRAMEWORKS:
        if installed := _find(framework.package, framework.module):
            table.add_row(framework.package, *_judge_framework(framework, installed))
            for part in framework.beside:
                table.add_row(part.distribution, *_judge(part, _find(part.distribution, part.module), False, megatron))
    table.add_row("GPU", *_find_gpu())
    console.print(table)
    return int(impossible)


def _judge(part: Part, installed: str | None, needed: bool, megatron: frozenset[str]) -> tuple[str, str]:
    """What stands beside the part: its version, and what is lost."""
    if installed is None:
        fits = [f"{name} was made for {part.made_for[name]}" for name in sorted(megatron & part.made_for.keys())]
        return f"[{'red' if needed else 'yellow'}]missing[/]", "; ".join([part.cost, *fits])
    release = tuple(map(int, re.findall(r"\d+", installed)))
    costs = [limit.cost for limit in part.limits if release and limit.is_broken_by(release, megatron)]
    imports = [module for place in ("", *sorted(megatron)) for module in part.imports.get(place, ())]
    names = PACKAGES | NEEDED
    absent = [names.get(module, module) for module in imports if importlib.util.find_spec(module) is None]
    costs += [f"does not import without {' and '.join(absent)}: {part.cost}"] if absent else []
    return f"[yellow]{installed}[/]" if costs else installed, "; ".join(costs)


def _judge_framework(framework: Framework, installed: str) -> tuple[str, str]:
    """Its version, and whether it is one whose sources the patches know, which are those that the tests run."""
    releases = KnownSources.read(Path(_engine.table_file)).package_releases(framework.package)
    tested = [release.removeprefix(f"{framework.package} ") for release in releases]
    if installed in tested:
        return installed, ""
    cost = f"the tests run {' and '.join(tested)}; `megatron-mtp-patches status` says which patches fit this version"
    return f"[yellow]{installed}[/]", cost


def _find(distribution: str, module: str) -> str | None:
    """The version of a package, or that it is present; None if it is not."""
    if module.startswith("megatron."):
        present = find_file(module) is not None
    else:
        present = importlib.util.find_spec(module) is not None
    if not present:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "present"


def _find_gpu() -> tuple[str, str]:
    try:
        import torch
    except ImportError:
        return "[yellow]unknown[/]", "torch is needed to look"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), ""
    return "[yellow]none[/]", "training needs `run --device cpu` (a rehearsal)"
