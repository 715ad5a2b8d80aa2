"""Tell the routers of a hybrid model's heads that they belong to a head.

NVIDIA/Megatron-LM#6748. A router of a head puts its auxiliary loss into the slot of its head, and a repeated head
divides it by the number of its passes.
"""

from __future__ import annotations

from megatron_overrides.call import Call


def mark_routers_of_head(call: Call) -> None:
    """Wraps MultiTokenPredictionLayer.__init__.

    The number of a router is its layer's in the pattern of the head, where that of any other head is the depth. There
    are no more slots than depths.
    """
    call.proceed()
    if getattr(call.instance, "mtp_layer_pattern", None) is None:
        return
    from megatron.core.transformer.moe.router import Router

    for module in call.instance.modules():
        if isinstance(module, Router):
            module.is_mtp_layer = True
            module.layer_number = call.instance.layer_number
