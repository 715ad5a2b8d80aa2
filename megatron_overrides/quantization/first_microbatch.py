"""The wrapper that begins a step of quantized layers."""

from __future__ import annotations

from megatron_overrides.call import Call


def begin_step_of_quantized_layers(call: Call) -> None:
    """Wraps MegatronModule.set_is_first_microbatch, which leaves out a model that only a recipe quantizes.

    NVIDIA/Megatron-LM#5642: a layer quantizes its weight anew in the first microbatch of a step, else it takes that of
    the microbatch before.
    """
    call.proceed()
    if getattr(call.instance.config, "quant_recipe", None) is not None:
        for module in call.instance.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
