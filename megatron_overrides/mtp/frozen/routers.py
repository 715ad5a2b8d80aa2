"""What Megatron updates without a gradient, in a model of which only the MTP heads train."""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.settings.model_settings import is_main_model_frozen


def update_routers_of_heads(call: Call) -> None:
    """Wraps _update_router_expert_bias and _update_router_qb_beta(model, config, ...), which walk the model chunks.

    The bias of a router in the frozen main model is part of it. The quantile balancing of 0.19 would move it towards
    zero, since routers collect no quantiles without gradients.
    """
    # Imported here: this module is imported while finalize_model_grads is being imported, and MTP after it.
    from megatron_overrides.mtp.frozen.frozen_main_model import heads_of

    if is_main_model_frozen(call["config"]):
        call["model"] = list(heads_of(call["model"]))
    call.proceed()
