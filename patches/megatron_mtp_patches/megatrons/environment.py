"""The packages that training with Megatron uses, and what each missing or unfitting one costs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from ..engine.source import find_file
from .known import TRANSFORMER_ENGINE, since

LOWEST_TORCH = (2, 11)  # of a rehearsal: the first whose gloo averages
# The modules that transformer_engine.pytorch imports at its top, and the names that pip knows them by.
IMPORTS_OF_TRANSFORMER_ENGINE = {
    "onnxscript": "onnxscript",
    "onnx": "onnx",
    "pydantic": "pydantic",
    "einops": "einops",
    "nvdlfw_inspect": "nvdlfw-inspect",
    "packaging": "packaging",
}


@dataclass(frozen=True)
class Limit:
    """The cost of a version below `lowest`, or from `first_unfit` on; `megatron`: only with these releases."""

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
    """A package, and what is lost without it: all training if `is_needed`, or with a Megatron that it is `needed_by`.

    `imports` are modules that it imports, with this Megatron or (under "") any, and whose packages it does not ask for.
    `made_for` has the version that each Megatron was made for.
    """

    distribution: str
    module: str
    cost: str
    is_needed: bool = False
    needed_by: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    imports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    made_for: Mapping[str, str] = field(default_factory=dict)

    def broken_limits(self, installed: str, megatron: frozenset[str]) -> list[Limit]:
        """The limits that do not hold for the installed version with these releases of Megatron."""
        release = tuple(map(int, re.findall(r"\d+", installed)))
        return [limit for limit in self.limits if release and limit.is_broken_by(release, megatron)]


PARTS = (
    Part(
        "torch",
        "torch",
        "nothing runs",
        is_needed=True,
        limits=(Limit("no rehearsal: `run --device cpu` needs torch >= 2.11", LOWEST_TORCH),),
    ),
    Part("megatron-core", "megatron.core", "there is nothing to patch", is_needed=True),
    Part("packaging", "packaging", "megatron-core does not import", is_needed=True),
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
        is_needed=True,
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
        imports={"": tuple(IMPORTS_OF_TRANSFORMER_ENGINE)},
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


def find_version(distribution: str, module: str) -> str | None:
    """The version of a package, or "present" where it does not say; None where it is not installed."""
    if module.startswith("megatron."):
        is_present = find_file(module) is not None
    else:
        is_present = importlib.util.find_spec(module) is not None
    if not is_present:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "present"
