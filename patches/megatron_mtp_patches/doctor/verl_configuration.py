"""The trainings of a configuration that verl composes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..engine import UsageError
from ..megatron_engine import ENGINE
from .configuration import Configuration, make_dtype, make_source, read_hugging_face_sizes
from .places import VERL_PPO, VERL_SFT, Places, sections_of

_OVERRIDES = ("override_transformer_config", "override_mcore_model_config", "override_ddp_config")
# One leaves out their gradient buffers, the other leaves nothing to train.
_ACT_ON_UNTRAINED_HEADS = ("disable_mtp_loss", "freeze_base_model_for_mtp")
_PLACES = ("ray_kwargs", "ray_init", "runtime_env", "env_vars")  # of the variables of the workers
_VARIABLE, _PACKAGE = "VERL_USE_EXTERNAL_MODULES", "megatron_mtp_patches"


def is_of_verl(content: dict[str, Any]) -> bool:
    """It is what verl's PPO trainer or its SFT trainer composes."""
    is_of_sft = all(isinstance(content.get(name), dict) for name in ("model", "engine", "optim"))
    return is_of_sft or isinstance(content.get("actor_rollout_ref"), dict)


def read_roles(content: dict[str, Any]) -> dict[str, Configuration]:
    """{role: its run}: the actor and, if verl trains one, the critic, where Megatron trains them; or `sft`.

    Raises:
        UsageError: Megatron trains none of them.
    """
    if not isinstance(content.get("actor_rollout_ref"), dict):
        return {"sft": _read_sft(content)}
    roles = {"actor": content["actor_rollout_ref"].get("actor")}
    if _has_critic(content):
        roles["critic"] = content["critic"]
    trained = {role: section for role, section in roles.items() if (section or {}).get("strategy") == "megatron"}
    if not trained:
        strategies = {str((section or {}).get("strategy")) for section in roles.values()}
        raise UsageError(
            f"verl trains this by {', '.join(sorted(strategies))}, not by Megatron: compose it with "
            f"model_engine=megatron"
        )
    variables = _read_variables(content)
    sections = {
        "actor": [*sections_of({name: section for name, section in content.items() if name != "critic"})],
        "critic": [*sections_of(content.get("critic") or {}, "critic")],
    }
    runs = {}
    for role, section in trained.items():
        model = section.get("model") or content["actor_rollout_ref"].get("model") or {}  # a critic has one of its own
        run = _read_run(section.get("megatron"), section.get("optim"), model, sections[role], VERL_PPO)
        ranks = SimpleNamespace(world_size=_count_ranks(content))
        runs[role] = run._replace(
            sources=[*run.sources, ranks],
            hints=(*_missing_variable(variables), *run.hints),
            shows_patches=_imports_patches(variables),
            patches=str(variables.get(ENGINE.project.choice_variable) or "").strip(),
            content={**content, "role": role},
        )
    return runs


def _read_sft(content: dict[str, Any]) -> Configuration:
    """The run of the SFT trainer. Its file says which patches it has only by their settings."""
    if not str(content["engine"].get("_target_")).endswith(".McoreEngineConfig"):
        raise UsageError("verl does not train this by Megatron: compose it with engine=megatron optim=megatron")
    run = _read_run(content["engine"], content["optim"], content["model"], [*sections_of(content)], VERL_SFT)
    ranks = SimpleNamespace(world_size=_count_ranks(content) if _count_ranks(content) > 1 else None)  # torchrun's
    return run._replace(
        sources=[*run.sources, ranks],
        shows_patches=any(VERL_SFT.settings_in(name) & section.keys() for name, section in run.sections),
        content={**content, "role": "sft"},
    )


def _count_ranks(content: dict[str, Any]) -> int:
    trainer = content.get("trainer") or {}
    return int(trainer.get("n_gpus_per_node") or 1) * int(trainer.get("nnodes") or 1)


def _has_critic(content: dict[str, Any]) -> bool:
    """As verl decides it (`need_critic` of verl 0.9.1)."""
    critic = content.get("critic") or {}
    if critic.get("enable") is not None:
        return bool(critic["enable"])
    return bool(critic) and (content.get("algorithm") or {}).get("adv_estimator", "gae") == "gae"


def _read_run(
    engine: dict[str, Any] | None,
    optimizer: dict[str, Any] | None,
    model: dict[str, Any],
    sections: list[tuple[str, Mapping[Any, Any]]],
    places: Places,
) -> Configuration:
    """The settings of a run, with what verl's engine sets for all runs."""
    engine, optimizer, heads = engine or {}, optimizer or {}, model.get("mtp") or {}
    model_settings = engine.get("override_transformer_config") or {}
    in_16_bits = bool(optimizer.get("use_precision_aware_optimizer")) and optimizer.get("main_grads_dtype") != "fp32"
    fixed = SimpleNamespace(
        is_of_verl=True,
        trains_adapters=bool((model.get("lora") or {}).get("rank")),
        calculate_per_token_loss=bool(engine.get("dynamic_context_parallel")) or None,
        accumulate_allreduce_grads_in_fp32=not in_16_bits,
        grad_reduce_in_fp32=not in_16_bits,
        overlap_grad_reduce=False,
    )
    overrides = [make_source(engine.get(name) or {}) for name in _OVERRIDES]
    sources = [
        *overrides,
        make_source(optimizer.get("override_optimizer_config") or {}),
        make_source(engine),
        make_source(optimizer),
        fixed,
        make_dtype(engine.get("dtype")),
    ]
    sizes, notes = read_hugging_face_sizes(model.get("path"), bool(heads.get("enable")))
    return Configuration(
        sources=[*sources, *sizes],
        sections=sections,
        places=places,
        untrained_heads="" if model_settings.get("mtp_num_layers") else _why_no_head_trains(heads),
        acting_without_heads=_ACT_ON_UNTRAINED_HEADS if heads.get("enable") else (),
        hints=tuple(_refused_with_heads(model_settings, heads)),
        notes=notes,
    )


def _why_no_head_trains(heads: dict[str, Any]) -> str:
    if not heads.get("enable"):
        return "mtp.enable is not true, so verl builds the model without MTP heads"
    if not heads.get("enable_train"):
        return "mtp.enable_train is not true, so verl trains no MTP heads but those of a HybridModel"
    return ""


def _refused_with_heads(model_settings: dict[str, Any], heads: dict[str, Any]) -> list[str]:
    """Say which setting ends the run before its second step, because the heads train or because they do not."""
    trains = bool(heads.get("enable_train"))
    name = "disable_mtp_loss" if trains else "freeze_base_model_for_mtp"
    if not heads.get("enable") or not model_settings.get(name):
        return []
    return [f"override_transformer_config.{name} is refused unless mtp.enable_train={str(not trains).lower()}"]


def _read_variables(content: dict[str, Any]) -> dict[str, Any]:
    """The variables of the workers."""
    variables: Any = content
    for place in _PLACES:
        variables = (variables or {}).get(place)
    return variables or {}


def _missing_variable(variables: dict[str, Any]) -> list[str]:
    """Say what to add where no variable of the workers has them import the patches."""
    if _imports_patches(variables):
        return []
    setting = f"{'.'.join(_PLACES)}.{_VARIABLE}={_PACKAGE}"
    return [f"the workers import the patches only where zero-touch is enabled: set {setting}"]


def _imports_patches(variables: dict[str, Any]) -> bool:
    return _PACKAGE in str(variables.get(_VARIABLE, "")).split(",")
