"""Detach MTP heads and count what they predict in mcore-bridge's own MTP loss, and refuse what does nothing there.

Its GPTModel computes the loss of the heads itself, from logits that go through the output layer before those of the
main model do.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.mtp.forward_pass import current
from megatron_overrides.mtp.heads.detached_heads import TAKES_MAIN_HIDDEN_STATES, are_detached
from megatron_overrides.mtp.heads.detached_output import detached_calls
from megatron_overrides.mtp.metrics.acceptance import logits_of
from megatron_overrides.settings.names import spell

# What acts in Megatron's own loss of the heads, with the value that is off.
_OF_MEGATRON_S_LOSS = {
    "mtp_loss_type": "cross_entropy",
    "mtp_depth_weights": None,
    "mtp_logits_chunk_size": 0,
    "mtp_acceptance_interval": 1,
    "mtp_acceptance_length_interval": 0,
    "freeze_base_model_for_mtp": False,
}


class _Projection:
    """One call of _postprocess.

    Attributes:
        heads: how many have run and are not projected yet.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.heads = 0

    def is_of_detached_head(self) -> bool:
        """Whether the output layer is called for a head that trains nothing but itself; counts the calls."""
        if not self.heads:
            return False
        self.heads -= 1
        return are_detached(self.config)


_projection: ContextVar[_Projection | None] = ContextVar("what mcore-bridge projects", default=None)


def refuse_settings(call: Call) -> None:
    """Wraps GPTModel.__init__(config, ...).

    Raises:
        ValueError: a setting of the heads' loss that has no effect here.
    """
    config = call["config"]
    for name, off in _OF_MEGATRON_S_LOSS.items():
        if getattr(config, "mtp_num_layers", None) and getattr(config, name, off) not in (off, None):
            raise ValueError(
                f"{spell(name)} {getattr(config, name)} has no effect under mcore-bridge, which computes the loss of "
                f"the MTP heads itself: leave it out"
            )
    call.proceed()


def project_heads(call: Call) -> Any:
    """Wraps GPTModel._postprocess(..., runtime_gather_output=None, ...).

    Raises:
        NotImplementedError: in an `mtp_pass`, which acts in Megatron's own loss.
    """
    if not (call.instance.post_process and getattr(call.instance, "mtp_process", False)):
        return call.proceed()
    current()
    gathers = call.get("runtime_gather_output")
    projection = _Projection(call.instance.config)
    token = _projection.set(projection)
    layer = call.instance.output_layer
    try:
        with logits_of(layer, gathers), detached_calls(layer, projection.is_of_detached_head):
            return call.proceed()
    finally:
        _projection.reset(token)


def add_head_to_project() -> None:
    """A head has run; the output layer is called for it before it is for the main model."""
    projection = _projection.get()
    if projection is not None:
        projection.heads += 1


def mark_first_head(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer.forward(..., layer_number=None): the input of head 1 is of the main model.

    Shared weights make one layer serve as all heads, so the number of the call counts.
    """
    number = call.get("layer_number")
    if are_detached(call.instance.config) and (call.instance.layer_number if number is None else number) == 1:
        setattr(call.instance, TAKES_MAIN_HIDDEN_STATES, True)
    add_head_to_project()
    return call.proceed()
