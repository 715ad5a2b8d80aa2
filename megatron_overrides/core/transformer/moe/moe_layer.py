"""Mark the parameters of all experts that a MoELayer builds (NVIDIA/Megatron-LM#5916)."""

from __future__ import annotations

from typing import Any

from megatron_overrides.support.expert_parameters import mark_expert_parameters

_PARALLEL_MODES = {"linear_fc1": "column", "linear_fc2": "row"}


def mark_experts_of_layer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps MoELayer.__init__: marks the parameters of its experts.

    Linear layers mark their own; GroupedMLP of 0.16.1 has weights without a linear layer.
    """
    wrapped(*args, **kwargs)
    for path, module in instance.experts.named_modules():
        mark_expert_parameters(module, _PARALLEL_MODES.get(path.rpartition(".")[2]), instance.config)
