"""Refuse settings of routers that would do nothing."""

from __future__ import annotations

from typing import Any

from megatron_overrides.settings.checks import spell


def check_global_aux_loss(settings: Any) -> None:
    """Raise ValueError if routers have no global_aux_loss to add up. A model without experts may share the setting."""
    if not getattr(settings, "moe_global_aux_loss_over_data_parallel", False):
        return
    has_experts = getattr(settings, "num_experts", None) or getattr(settings, "num_moe_experts", None)
    types = getattr(settings, "moe_router_load_balancing_type", None)
    if has_experts and "global_aux_loss" not in (types if isinstance(types, (list, tuple)) else [types]):
        raise ValueError(
            f"{spell('moe_global_aux_loss_over_data_parallel')} has no effect, because routers have no "
            f"global_aux_loss: name it in {spell('moe_router_load_balancing_type')}, which is {types!r}, or leave the "
            f"setting out"
        )
