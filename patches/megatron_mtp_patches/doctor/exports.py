"""What is wrong with an exported model of Hugging Face, by its files: its MTP heads, values that are not finite, and
what it lacks of the model that it was trained from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..engine import UsageError

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")  # of heads, in config.json
_HEAD = re.compile(r"(?:^|\.)mtp(?:_layers)?\.(?:layers\.)?(\d+)?")  # mtp.layers.0.mlp, mtp.norm, model.mtp_layers.0
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Problem(NamedTuple):
    """What is wrong, as a sentence, and with which tensors or heads."""

    text: str
    names: list[str]


class Export:
    """An exported model.

    Attributes:
        folder: its folder.
        config: what config.json says of the language model.
        files: {name of a tensor: the file that has it}.

    Raises:
        UsageError: the folder is none of a model with safetensors files, or a file of it is cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} is no folder of a model: it has no config.json")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = config.get("text_config", config)
        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as tensors:
                    self.files |= dict.fromkeys(tensors.keys(), path)
            except SafetensorError as error:
                raise UsageError(f"{path} cannot be read ({error}): copy it or export it again") from error
        if not self.files:
            raise UsageError(f"{folder} has no tensors in *.safetensors: other files are not read")

    @property
    def declared_heads(self) -> int:
        """How many MTP heads config.json declares."""
        return next((count for name in _COUNTS if (count := self.config.get(name))), 0)

    @property
    def indexed(self) -> set[str]:
        """The tensors that the index names; all that are there, where it lacks."""
        index = self.folder / "model.safetensors.index.json"
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else {*self.files}

    def find_heads(self) -> dict[int, list[str]]:
        """{number of an MTP head, from 0: its tensors}; a layer beyond the declared ones is a head."""
        heads: dict[int, list[str]] = {}
        layers = self.config.get("num_hidden_layers")
        for name in self.files:
            if match := _HEAD.search(name):
                heads.setdefault(int(match[1] or 0), []).append(name)
            elif layers is not None and (match := _LAYER.search(name)) and int(match[1]) >= layers:
                heads.setdefault(int(match[1]) - layers, []).append(name)
        return heads

    def read(self, name: str) -> Any:
        """Return a tensor, on the CPU."""
        with safe_open(self.files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


def find_problems(export: Export, base: Export | None) -> list[Problem]:
    """What is wrong with an export, also against the model that it was trained from; each tensor is read by itself."""
    heads, declared = export.find_heads(), export.declared_heads
    missing = [f"head {number}" for number in range(declared) if number not in heads]
    undeclared = [name for number in sorted(heads) if number >= declared for name in heads[number]]
    broken = [name for name in export.files if not export.read(name).float().isfinite().all()]
    problems = [
        Problem(f"config.json declares {declared} MTP heads, and no tensor is of these", missing),
        Problem(f"config.json declares {declared} MTP heads, so an engine leaves these tensors out", undeclared),
        Problem("the index names these tensors, and no file has them", sorted(export.indexed - {*export.files})),
        Problem("these tensors are not finite", broken),
        *(_compare(export, base) if base else ()),
    ]
    return [one for one in problems if one.names]


def _compare(export: Export, base: Export) -> Iterator[Problem]:
    other, equal = [], set()
    for name in base.files.keys() & export.files.keys():
        old, new = base.read(name), export.read(name)
        if old.shape != new.shape:
            other.append(f"{name} ({tuple(old.shape)} in the base, {tuple(new.shape)})")
        elif old.to(new.dtype).equal(new):
            equal.add(name)
    yield Problem("the base has these tensors, the export has not", sorted(base.files.keys() - export.files.keys()))
    yield Problem("these tensors have another shape than in the base", sorted(other))
    same = [f"head {number}" for number, names in sorted(export.find_heads().items()) if equal.issuperset(names)]
    yield Problem("these heads are those of the base: they were not trained, or not exported", same)
