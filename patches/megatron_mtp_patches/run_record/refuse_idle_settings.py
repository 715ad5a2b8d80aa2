"""Refuse settings of the patches that do not act, before the first step: an object or a dictionary takes any name.

A command line of Megatron's trainer needs no such check, because its parser does not know the flag then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from megatron_overrides.model_chunks import as_list
from megatron_overrides.settings.checks import changed_settings

from ..doctor.idle_settings import find_idle_settings, find_settings_without_heads
from ..doctor.ms_swift_configuration import why_no_head_trains
from ..doctor.places import MEGATRON, MEGATRON_BRIDGE, MS_SWIFT, VERL_ENGINE, VERL_PPO, VERL_SFT, Places, sections_of
from ..engine.call import Call

logger = logging.getLogger(__name__)


def check_configs(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...), where both configurations of a run are known.

    Raises:
        ValueError: one of them has such a setting.
    """
    model_config = next((chunk.config for chunk in as_list(call["model_chunks"]) if hasattr(chunk, "config")), None)
    configs = {"TransformerConfig": model_config, "OptimizerConfig": call["config"]}
    _refuse(((name, _strays(config)) for name, config in configs.items()), MEGATRON)
    return call.proceed()


def check_bridge_container(call: Call) -> Any:
    """Wraps ConfigContainer.validate() of Megatron-Bridge, which its trainings call first.

    Raises:
        ValueError: the container or one of its sections has such a setting.
    """
    sections = {"": call.instance, **vars(call.instance)}
    # A field that is there may still lack the patch without which Bridge does not act on it.
    _refuse(((name, [*_strays(one), *changed_settings(one)]) for name, one in sections.items()), MEGATRON_BRIDGE)
    return call.proceed()


def check_bridge_overrides(call: Call) -> Any:
    """Wraps parse_hydra_overrides(cfg, overrides) of Megatron-Bridge: a misplaced one ends in an error of Hydra's.

    Raises:
        ValueError: one of the overrides, with or without `+`, is such a setting.
    """
    paths = (word.lstrip("+~").partition("=")[0].split(".") for word in call["overrides"])
    _refuse(((path[-2] if len(path) > 1 else "", path[-1:]) for path in paths), MEGATRON_BRIDGE)
    return call.proceed()


def check_bridge_values(call: Call) -> Any:
    """Wraps apply_overrides(config_obj, overrides_dict, excluded_fields) of Megatron-Bridge, which skips unknown names.

    Raises:
        ValueError: such a setting is among them.
    """
    _refuse(_skipped(call["config_obj"], call["overrides_dict"]), MEGATRON_BRIDGE)
    return call.proceed()


def check_verl_configuration(call: Call) -> Any:
    """Wraps auto_set_device(config) and need_critic(config), which verl's trainers call with their configuration.

    Raises:
        ValueError: such a setting is in it, at any depth.
    """
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(call["config"], resolve=False)
    _refuse(sections_of(content), VERL_PPO if "actor_rollout_ref" in content else VERL_SFT)
    return call.proceed()


def check_verl_engine(call: Call) -> Any:
    """Wraps MegatronEngine.__init__(model_config, engine_config, optimizer_config, ...), also without verl's trainers.

    Raises:
        ValueError: one of the dictionaries for Megatron's configurations has such a setting.
    """
    configs = (call["engine_config"], call["optimizer_config"])
    _refuse(
        ((name, getattr(config, name, None) or ()) for config in configs for name in VERL_ENGINE.sections), VERL_ENGINE
    )
    return call.proceed()


def check_swift_arguments(call: Call) -> Any:
    """Wraps parse_args(class_type, argv) of ms-swift, which returns its arguments and the words that it does not know.

    An argument whose patch is left out would reach no configuration of Megatron, and one of MTP heads would act on
    nothing in a model without them.

    Raises:
        ValueError: there is such a setting; with --ignore_args_error, a line in the log says so.
    """
    result = arguments, words = call.proceed()
    if all(one.__name__ != "MegatronArguments" for one in type(arguments).__mro__):
        return result
    unknown = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    fields = type(arguments).__dataclass_fields__
    changed = [
        name for name in MS_SWIFT.sections[""] & fields.keys() if getattr(arguments, name) != fields[name].default
    ]
    problems = list(find_idle_settings([("", [*unknown, *sorted(changed)])], MS_SWIFT))
    if why := why_no_head_trains(vars(arguments)):
        problems += find_settings_without_heads(changed, (), why)
    if problems and getattr(arguments, "ignore_args_error", False):
        logger.warning("; ".join(problems))
    elif problems:
        raise ValueError("\n".join(problems))
    return result


def _strays(config: Any) -> list[str]:
    """The attributes of a dataclass that are none of its fields."""
    fields = getattr(type(config), "__dataclass_fields__", None)
    return sorted(vars(config).keys() - fields.keys()) if fields else []


def _skipped(config: Any, values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, list[str]]]:
    """The name of each section of `config`, and those of `values` for it that are none of its attributes."""
    yield section, [name for name in values if not hasattr(config, name)]
    for name, value in values.items():
        if isinstance(value, Mapping) and is_dataclass(inner := getattr(config, name, None)):
            yield from _skipped(inner, value, name)


def _refuse(sections: Iterable[tuple[str, Iterable[Any]]], places: Places) -> None:
    if problems := list(find_idle_settings(sections, places)):
        raise ValueError("\n".join(problems))
