"""Mark the parameters of experts whose linear layers are TransformerEngine's (NVIDIA/Megatron-LM#5916)."""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.moe.expert_parameters import mark_expert_parameters


def mark_experts_of_linear(call: Call) -> None:
    """Wraps TELinear.__init__ and TEGroupedLinear.__init__, which are told how the layer is split."""
    call.proceed()
    if call.get("is_expert"):
        mark_expert_parameters(call.instance, call.get("parallel_mode"), call["config"])
