"""The settings of rotary position embeddings that a run has and the builder of its model does not pass on."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.run_arguments import arguments_of_run


def pass_rope_scaling_factor(call: Call) -> None:
    """Wraps GPTModel.__init__: where the builder of a run passes no factor, it is --rope-scaling-factor.

    NVIDIA/Megatron-LM#6306.
    """
    is_passed = _is_passed(call, "rope_scaling_factor")  # before the arguments are asked by name
    factor = getattr(arguments_of_run(), "rope_scaling_factor", None)
    if call["rope_scaling"] and factor is not None and not is_passed:
        call["rope_scaling_factor"] = factor
    call.proceed()


def pass_rotary_settings_to_language_model(call: Call) -> None:
    """Wraps LLaVAModel.__init__: what a script does not pass is --rotary-base and --rope-scaling-factor.

    NVIDIA/Megatron-LM#6586: it has defaults for both, and gives its GPT these.
    """
    run = arguments_of_run()
    values = {name: getattr(run, name, None) for name in ("rotary_base", "rope_scaling_factor")}
    missing = [name for name, value in values.items() if value is not None and not _is_passed(call, f"language_{name}")]
    for name in missing:
        call[f"language_{name}"] = values[name]
    call.proceed()


def _is_passed(call: Call, name: str) -> bool:
    """True if the caller gives this argument itself."""
    return name in call.kwargs or len(call.args) > list(call.parameters).index(name)


def configure_rope_scaling_factor(call: Call) -> Any:
    """Wraps gpt_config_from_args (0.19, main), which leaves the factor of the model's configuration at 8."""
    config = call.proceed()
    if getattr(call["args"], "rope_scaling_factor", None) is not None:
        config.rope_scaling_factor = call["args"].rope_scaling_factor
    return config
