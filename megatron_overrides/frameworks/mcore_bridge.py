"""Detach MTP heads and count what they predict in mcore-bridge's own MTP loss, and refuse what does nothing there.

Its GPTModel computes the loss of the heads itself, from logits that go through the output layer before those of the
main model do.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.mtp.forward_pass import current, recorded_pass, running_pass
from megatron_overrides.mtp.heads.detached_heads import TAKES_MAIN_HIDDEN_STATES, are_detached
from megatron_overrides.mtp.heads.detached_output import detached_calls
from megatron_overrides.settings.checks import declared_settings
from megatron_overrides.settings.names import spell


def refuse_settings(call: Call) -> None:
    """Wraps GPTModel.__init__(config, ...).

    Raises:
        ValueError: a setting acts in Megatron's own loss of the heads alone, so it has no effect here.
    """
    config = call["config"]
    for declared in declared_settings(type(config)) if getattr(config, "mtp_num_layers", None) else ():
        value = getattr(config, declared.name)
        if not declared.in_ms_swift and value not in (declared.default, None):
            raise ValueError(
                f"{spell(declared.name)} {value} has no effect under mcore-bridge, which computes the loss of the MTP "
                f"heads itself: leave it out"
            )
    call.proceed()


def project_heads(call: Call) -> Any:
    """Wraps GPTModel._postprocess(..., runtime_gather_output=None, ...).

    Raises:
        NotImplementedError: in an `mtp_pass`, which acts in Megatron's own loss.
    """
    if not (call.instance.post_process and getattr(call.instance, "mtp_process", False)):
        return call.proceed()
    recorded_pass()
    layer, is_detached = call.instance.output_layer, are_detached(call.instance.config)
    logits_source = layer, call.get("runtime_gather_output")
    heads: list[Any] = []

    def projects_detached_head() -> bool:
        """Whether the output layer is called for a head that trains nothing but itself; the main model comes last."""
        if not heads:
            return False
        heads.pop()
        return is_detached

    with (
        running_pass(output_layer=logits_source, unprojected_heads=heads),
        detached_calls(layer, projects_detached_head),
    ):
        return call.proceed()


def mark_first_head(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer.forward(..., layer_number=None): the input of head 1 comes from the main model.

    Shared weights make one layer serve as all heads, so the number of the call counts.
    """
    number = call.get("layer_number")
    if are_detached(call.instance.config) and (call.instance.layer_number if number is None else number) == 1:
        setattr(call.instance, TAKES_MAIN_HIDDEN_STATES, True)
    heads = current().unprojected_heads
    if heads is not None:
        heads.append(call.instance)
    return call.proceed()
