"""The wrappers around Megatron's functions that set up a model and write the log."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.run_arguments import arguments_of_run


def freeze_all_layers(call: Call) -> None:
    """Wraps the __init__(config, ddp_config, module, ...) of DDP, Megatron-FSDP and FSDP2 (NVIDIA/Megatron-LM#5926).

    --freeze-all-layers acts before a model is wrapped, whoever has built it. Routers keep their expert bias.
    """
    if getattr(arguments_of_run(), "freeze_all_layers", False):
        call["module"].requires_grad_(False)
        for module in call["module"].modules():
            if hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = True
    call.proceed()


def start_new_log_interval(call: Call) -> Any:
    """Wraps training_log(..., iteration, ..., is_first_iteration) (NVIDIA/Megatron-LM#7092).

    After the first line of a process Megatron keeps its sums, for the line at the end of the interval. Where that is
    the first line itself, they must not be in the next one.
    """
    if call.get("is_first_iteration") and call["iteration"] % arguments_of_run().log_interval == 0:
        call["is_first_iteration"] = False
    return call.proceed()
