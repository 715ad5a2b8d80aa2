"""Mark the parameters of experts whose linear layers are TransformerEngine's (NVIDIA/Megatron-LM#5916)."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.support.expert_parameters import mark_expert_parameters


def mark_experts_of_linear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps TELinear.__init__ and TEGroupedLinear.__init__, which are told how the layer is split."""
    wrapped(*args, **kwargs)
    arguments = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if arguments.get("is_expert"):
        mark_expert_parameters(instance, arguments.get("parallel_mode"), arguments["config"])
