"""What is wrong with an exported model of Hugging Face, by its files: its MTP heads, values that are not finite, and
what it lacks of the model that it was trained from.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..engine import UsageError

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")  # of heads, in config.json
_LANGUAGE_MODEL = r"^(?:model\.|language_model\.|thinker\.)*"
_HEAD = re.compile(_LANGUAGE_MODEL + r"mtp(?:_layers)?\.(?:layers\.)?(\d+)?")  # mtp.layers.0.mlp, mtp.norm
_LAYER = re.compile(_LANGUAGE_MODEL + r"layers\.(\d+)\.")
_OFTEN_SHARED = ("embed_tokens.weight", "lm_head.weight")


class Problem(NamedTuple):
    """What is wrong, as a sentence, and with which tensors or heads."""

    text: str
    names: list[str]


class Export:
    """An exported model.

    Attributes:
        config: what config.json says, in multimodal models of the language model as well.
        files: {name of a tensor: the file that has it}, without those that the index does not name.
        indexed: the tensors that the index names; those of `files`, where there is no index.
        others: the tensors that are in a file, and that the index does not name.

    Raises:
        UsageError: the folder is none of a model with safetensors files, or a file of it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} is no folder of a model: it has no config.json")
        config = _read_json(folder / "config.json")
        part = config.get("text_config")
        self.config = config | (part if isinstance(part, dict) else {})
        self._open = functools.cache(_open)
        stored = {(name, file) for file in sorted(folder.glob("*.safetensors")) for name in [*self._open(file).keys()]}
        self.files = dict(sorted(stored))
        index = folder / "model.safetensors.index.json"
        self.indexed = set(self.files)
        if index.is_file():
            places = _read_json(index, "weight_map")["weight_map"]
            self.indexed = set(places)
            self.files = {name: folder / place for name, place in places.items() if (name, folder / place) in stored}
        self.others = {name for name, _ in stored} - self.indexed
        if not stored:
            raise UsageError(f"{folder} has no tensors in *.safetensors: other files are not read")

    @property
    def declared_heads(self) -> int:
        """How many MTP heads config.json declares."""
        counts = [self.config.get(name) for name in _COUNTS]
        return next((count for count in counts if isinstance(count, int) and count), 0)

    def find_heads(self) -> dict[int, list[str]]:
        """{number of an MTP head, from 0: its tensors}; a layer beyond the declared ones is a head."""
        heads: dict[int, list[str]] = {}
        layers = self.config.get("num_hidden_layers", math.inf)
        for name in self.files:
            if match := _HEAD.match(name):
                heads.setdefault(int(match[1] or 0), []).append(name)
            elif (match := _LAYER.match(name)) and int(match[1]) >= layers:
                heads.setdefault(int(match[1]) - layers, []).append(name)
        return heads

    def read(self, name: str) -> Any:
        """Return a tensor, on the CPU."""
        return self._open(self.files[name]).get_tensor(name)


def find_problems(export: Export, base: Export | None) -> list[Problem]:
    """What is wrong with an export, also against the model that it was trained from; each tensor is read by itself."""
    heads, declared = export.find_heads(), export.declared_heads
    missing = [f"head {number}" for number in range(declared) if number not in heads]
    undeclared = [name for number in sorted(heads) if number >= declared for name in heads[number]]
    before = base.files if base else {}
    broken, reshaped, equal = [], [], set()
    for name in export.files:
        new = export.read(name)
        if not _is_finite(new):
            broken.append(name)
        if base and name in before:
            old = base.read(name)
            if old.shape != new.shape:
                reshaped.append(f"{name} ({tuple(old.shape)} in the base, {tuple(new.shape)})")
            elif old.to(new.dtype).equal(new):
                equal.add(name)
    gone = [name for name in sorted(before.keys() - export.files.keys()) if base and not _is_copy(name, base, export)]
    unstored = sorted(export.indexed - export.files.keys())
    same = [f"head {number}" for number, names in sorted(heads.items()) if equal.issuperset(names)]
    problems = [
        Problem(f"config.json declares {declared} MTP heads, and no tensor is of these", missing),
        Problem(f"config.json declares {declared} MTP heads, so an engine leaves these tensors out", undeclared),
        Problem("the index names these tensors, but their files do not have them", unstored),
        Problem("the index does not name these tensors of the files, so they are not loaded", sorted(export.others)),
        Problem("these tensors are not finite", broken),
        Problem("the base has these tensors, the export does not", gone),
        Problem("these tensors have another shape than in the base", reshaped),
        Problem("these heads are those of the base: they were not trained, or not exported", same),
    ]
    return [one for one in problems if one.names]


def _is_finite(tensor: Any) -> bool:
    for number in (lambda: tensor, tensor.float):  # torch asks few dtypes of 8 bits, and converts none of 4
        try:
            return bool(number().isfinite().all())
        except RuntimeError:
            continue
    return True


def _is_copy(name: str, base: Export, export: Export) -> bool:
    """True if the base has a tensor a second time, as the embedding in its heads, and the export has one of the two."""
    shared = [one for one in base.files if one in export.files and one.endswith(_OFTEN_SHARED)]
    tensor = base.read(name) if name.endswith(("head.weight", *_OFTEN_SHARED)) else None
    return tensor is not None and any(base.read(one).equal(tensor) for one in shared)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read ({error}): copy it or export it again") from error


def _read_json(file: Path, *keys: str) -> dict[str, Any]:
    """The object in a file, in which these keys have objects."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}): copy it or export it again") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in keys):
        raise UsageError(f"{file} has no object of JSON {' and '.join(keys)}".rstrip() + ": copy it or export it again")
    return content
