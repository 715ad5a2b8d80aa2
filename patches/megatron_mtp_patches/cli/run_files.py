"""The runs that a file describes: flags, or the configuration of a framework."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..engine import UsageError
from .launch_script import Command, read_commands

_KINDS = (
    "MODEL_ARGS, as a recipe of Megatron-LM's functional tests; a section `model`, as a run_config.yaml of "
    "Megatron-Bridge; `actor_rollout_ref`, as a configuration that verl composes; nor `tensor_model_parallel_size` "
    "with `model` or `mcore_model`, as an args.json or a --config of ms-swift"
)
_VERL_OVERRIDES = ("override_transformer_config", "override_mcore_model_config", "override_ddp_config")
_DTYPES = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}


def read_runs(file: Path) -> list[tuple[str, Command | SimpleNamespace]]:
    """The runs of a file, named after it: the flags of each, or as `sources` the sections of its configuration.

    A YAML or JSON file is a recipe of Megatron-LM's functional tests, a run_config.yaml of Megatron-Bridge, a composed
    configuration of verl, whose actor and critic are runs, or an args.json or --config of ms-swift. Any other file is a
    launch script, or has flags as text. verl and ms-swift take the settings of a model, such as its experts, from its
    Hugging Face configuration: they count as absent unless the file overrides them.

    Raises:
        UsageError: the file cannot be read, or is none of these.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"it cannot be read: {error}") from error
    if file.suffix not in (".yaml", ".yml", ".json"):
        commands = read_commands(text, os.environ)
        several = len(commands) > 1
        return [(f"{file} {Path(one.script).name}" if several else str(file), one) for one in commands]
    content = _parse_json(text) if file.suffix == ".json" else _parse_yaml(text)
    recipes = {name: flags for name, flags in content.items() if re.fullmatch(r"MODEL_ARGS(_\d+)?", str(name))}
    if recipes and all(isinstance(flags, dict) for flags in recipes.values()):
        several = len(recipes) > 1
        return [
            (
                f"{file} {name}" if several else str(file),
                Command("", [], [word for pair in flags.items() for word in _words(*pair)], []),
            )
            for name, flags in recipes.items()
        ]
    if isinstance(content.get("actor_rollout_ref"), dict):
        return list(_runs_of_verl(file, content))
    if "tensor_model_parallel_size" in content and ("mcore_model" in content or "model" in content):
        dtype = _DTYPES.get(str(content.get("torch_dtype")).removeprefix("torch."), {})
        return [(str(file), SimpleNamespace(sources=[_source(content), SimpleNamespace(**dtype)]))]
    if isinstance(content.get("model"), dict):
        sections = [section for section in content.values() if isinstance(section, dict)]
        return [(str(file), SimpleNamespace(sources=[_source(section) for section in sections]))]
    raise UsageError(f"it has neither {_KINDS}")


def _runs_of_verl(file: Path, content: dict[str, Any]) -> Iterator[tuple[str, SimpleNamespace]]:
    """The actor and the critic, where Megatron trains them, with what verl's engine sets for all runs."""
    trainer = content.get("trainer") or {}
    roles = {"actor": content["actor_rollout_ref"].get("actor"), "critic": content.get("critic")}
    trained = {role: section for role, section in roles.items() if (section or {}).get("strategy") == "megatron"}
    if not trained:
        raise UsageError("it is a configuration of verl in which Megatron trains nothing (strategy: megatron)")
    for role, section in trained.items():
        engine, optimizer = section.get("megatron") or {}, section.get("optim") or {}
        overrides = [_source(engine.get(name) or {}) for name in _VERL_OVERRIDES]
        overrides.append(_source(optimizer.get("override_optimizer_config") or {}))
        in_16_bits = (
            bool(optimizer.get("use_precision_aware_optimizer")) and optimizer.get("main_grads_dtype") != "fp32"
        )
        fixed = {
            "world_size": int(trainer.get("n_gpus_per_node") or 1) * int(trainer.get("nnodes") or 1),
            "calculate_per_token_loss": bool(engine.get("dynamic_context_parallel")) or None,
            "accumulate_allreduce_grads_in_fp32": not in_16_bits,
            "grad_reduce_in_fp32": not in_16_bits,
            "overlap_grad_reduce": False,
            **_DTYPES.get(str(engine.get("dtype")), {}),
        }
        sources = [*overrides, _source(engine), _source(optimizer), SimpleNamespace(**fixed)]
        yield f"{file} {role}", SimpleNamespace(sources=sources)


def _parse_yaml(text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("reading YAML needs pyyaml (pip install pyyaml)") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"it is not YAML: {error}") from error
    return content if isinstance(content, dict) else {}


def _parse_json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"it is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _words(flag: str, value: object) -> list[str]:
    """As Megatron-LM's functional tests make them: true is a switch that is on, false and null one that is off."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    in_brackets = re.fullmatch(r"\[([\w ]+)\]", text)  # several words, not a list that Megatron reads itself
    return [flag, *shlex.split(in_brackets[1] if in_brackets else text)]


def _source(section: dict[Any, Any]) -> SimpleNamespace:
    """A section as an object.

    Left out are what YAML needs to make an object of it, settings that are objects of their own, and references to
    other settings (`${...}`).
    """
    return SimpleNamespace(
        **{
            str(name): value
            for name, value in section.items()
            if not str(name).startswith("_") and not isinstance(value, dict) and not str(value).startswith("${")
        }
    )
