"""Mark the parameters of all experts that a MoELayer builds (NVIDIA/Megatron-LM#5916)."""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.moe.expert_parameters import mark_expert_parameters

_PARALLEL_MODES = {"linear_fc1": "column", "linear_fc2": "row"}


def mark_experts_of_layer(call: Call) -> None:
    """Wraps MoELayer.__init__: marks the parameters of its experts.

    Linear layers mark their own; GroupedMLP of 0.16.1 has weights without a linear layer.
    """
    call.proceed()
    for path, module in call.instance.experts.named_modules():
        mark_expert_parameters(module, _PARALLEL_MODES.get(path.rpartition(".")[2]), call.instance.config)
