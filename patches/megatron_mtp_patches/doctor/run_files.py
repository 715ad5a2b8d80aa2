"""The runs that a file describes: flags, or the configuration of a framework."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from ..engine import UsageError
from . import ms_swift_configuration
from .configuration import Configuration, choice_in, make_source
from .launch_script import Command, read_commands
from .mappings import SUFFIXES, read_mapping, read_text
from .ms_swift_commands import read_command
from .places import MEGATRON_BRIDGE, sections_of
from .verl_configuration import is_of_verl, read_roles

_KINDS = (
    "MODEL_ARGS, as a recipe of Megatron-LM's functional tests; a section `model`, as a run_config.yaml of "
    "Megatron-Bridge; `actor_rollout_ref`, or `engine` and `optim` beside `model`, as a configuration that verl "
    "composes; nor the name of a `model` or `mcore_model` with a batch size or a parallel size of Megatron or a "
    "setting of MTP heads or of the patches, as an args.json or a YAML file of ms-swift"
)

# Sections of Megatron-Bridge's `dataset` on which a defect depends, in 0.5 and in 0.6.
_PACKING = ("packed_sequence_specs", "offline_packing_specs")


def read_runs(file: Path) -> list[tuple[str, Command | Configuration]]:
    """The runs of a file, named after it: the flags of each, or its configuration.

    A YAML or JSON file is a recipe of Megatron-LM's functional tests, a run_config.yaml of Megatron-Bridge, a composed
    configuration of verl, whose actor is a run, as its critic if it has one, or whose SFT trainer is, or an args.json
    or YAML file of ms-swift. Any other file is a launch script, in which a command of ms-swift is such a configuration,
    or has flags as text. verl and ms-swift take the settings of a model, such as its experts, from its Hugging Face
    configuration: they count as absent unless the file overrides them.

    Raises:
        UsageError: the file cannot be read, or is none of these.
    """
    if file.suffix not in SUFFIXES:
        commands = read_commands(read_text(file), os.environ)
        has_several = len(commands) > 1
        return [
            (f"{file} {Path(one.script).name}" if has_several else str(file), read_command(one, file.parent))
            for one in commands
        ]
    content = read_mapping(file)
    recipes = {name: flags for name, flags in content.items() if re.fullmatch(r"MODEL_ARGS(_\d+)?", str(name))}
    if recipes and all(isinstance(flags, dict) for flags in recipes.values()):
        if content.get("MODE") == "inference":
            raise UsageError("MODE is inference, so it trains nothing")
        has_several = len(recipes) > 1
        return [
            (
                f"{file} {name}" if has_several else str(file),
                Command("", [], [word for pair in flags.items() for word in _words(*pair)], []),
            )
            for name, flags in recipes.items()
        ]
    if is_of_verl(content):
        return [(f"{file} {role}", configuration) for role, configuration in read_roles(content).items()]
    if ms_swift_configuration.is_one(content):
        return [(str(file), ms_swift_configuration.read(content))]
    if isinstance(content.get("model"), dict):
        sections = [*sections_of(content)]
        read = [section for name, section in sections[1:] if name in content or _is_read(name)]
        sources = [
            *map(make_source, read),
            SimpleNamespace(is_of_megatron_bridge=True, trains_adapters=bool(content.get("peft"))),
        ]
        has_heads = any(getattr(source, "mtp_num_layers", None) for source in sources)
        untrained = "" if has_heads else "model.mtp_num_layers is not set, so the model has no MTP heads"
        choice = choice_in((content.get("logger") or {}).get("megatron_mtp_patches"))
        return [
            (
                str(file),
                Configuration(
                    sources,
                    sections,
                    MEGATRON_BRIDGE,
                    untrained,
                    patches=choice,
                    shows_patches=bool(choice),
                    content=content,
                ),
            )
        ]
    raise UsageError(f"it has neither {_KINDS}")


def _is_read(section: str) -> bool:
    """True for a section of Megatron-Bridge below the outermost ones on which a setting or a defect depends."""
    return bool(MEGATRON_BRIDGE.settings_in(section)) or section.rpartition(".")[2] in _PACKING


def _words(flag: str, value: object) -> list[str]:
    """As Megatron-LM's functional tests make them: true is a switch that is on, false and null one that is off."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    in_brackets = re.fullmatch(r"\[([^]]+)\]", text)  # several words
    return [flag, *shlex.split(in_brackets[1] if in_brackets else text)]
