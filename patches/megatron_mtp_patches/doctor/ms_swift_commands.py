"""The run that a command of a launch script starts with ms-swift: its arguments, its ranks and its patches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from ..engine import UsageError
from ..megatron_engine import ENGINE
from .bash import parameters_in
from .configuration import Configuration
from .launch_script import MS_SWIFT, MS_SWIFT_METHODS, Command
from .mappings import SUFFIXES, read_mapping
from .ms_swift_configuration import RANKS, has_added_arguments, is_one, read

_OWN_SCRIPTS = "_megatron"  # the folder of the scripts that `megatron` starts: sft.py and others


def read_command(command: Command, folder: Path) -> Command | Configuration:
    """The run of a command of ms-swift; any other command as it is. `folder` is that of the launch script.

    Raises:
        UsageError: the file with its arguments cannot be read.
    """
    path = PurePath(command.script)
    is_launcher, is_own_script = path.name == MS_SWIFT, path.parent.name == _OWN_SCRIPTS
    method, *words = [path.stem, *command.flags] if is_own_script else command.flags or [""]
    if method not in MS_SWIFT_METHODS:
        return command
    try:
        content = _read_content(words, folder)
    except UsageError:
        if is_launcher or is_own_script:
            raise
        return command
    if not (is_launcher or is_own_script or is_one(content)):
        return command
    if method == "rlhf":
        content.setdefault("rlhf_type", "dpo")
    names = [ENGINE.project.choice_variable, *(RANKS if is_launcher else ())]
    variables = {name: command.variables[name] for name in names if name in command.variables}
    if is_launcher and isinstance(content.get("ENV"), dict):
        variables = {**content["ENV"], **variables}
    run = read({**content, "ENV": variables}, command.world_size())
    loads_patches = command.loads_patches(folder)
    hints = command.hints_on_patches(loads_patches, True) if run.patches and not is_launcher else ()
    return run._replace(
        shows_patches=has_added_arguments(content) or (bool(run.patches) if loads_patches is None else loads_patches),
        is_enabled_by_variable=is_launcher and bool(run.patches),
        notes=(*run.notes, *hints, *command.hints_on_script()),
    )


def _read_content(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The arguments among the words of a command, after those of the file that its first word may name."""
    content: dict[str, Any] = {}
    if words and words[0].endswith(SUFFIXES):
        content = _read_file(words[0], folder)
        words = words[1:]
    values: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match("--[A-Za-z]", word):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if has_value else []
        elif name and not (values[name] and parameters_in([word])):  # such as "$@", which may be any arguments
            values[name].append(word)
    return content | {name: texts[0] if len(texts) == 1 else texts or True for name, texts in values.items()}


def _read_file(name: str, folder: Path) -> dict[str, Any]:
    places = [folder / name, Path.cwd() / name]
    file = next((place for place in places if place.is_file()), places[0])
    try:
        return read_mapping(file)
    except UsageError as error:
        raise UsageError(f"{file}, which has arguments of ms-swift: {error}") from error
