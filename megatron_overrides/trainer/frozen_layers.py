"""The wrapper that freezes all layers of a model, as --freeze-all-layers asks, before it is wrapped."""

from __future__ import annotations

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
