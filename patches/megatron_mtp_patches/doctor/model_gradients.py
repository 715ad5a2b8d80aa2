"""Whether Megatron's schedules finalize the gradients of a model that a trainer has set up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .findings import Finding

_TEXT = (
    "The schedule does not finalize gradients: no loss per token is divided by the number of tokens, and the copies of "
    "weights keep different gradients where that function would reduce them"
)
_REMEDY = (
    "set finalize_model_grads_func on megatron.core.utils.get_model_config(model), which the schedule asks; the "
    "trainer has set it on another object, or on none"
)


def model_configuration(model: Any) -> Any:
    """The configuration that a schedule takes from a model, or from the first of its chunks.

    Raises:
        TypeError: `model` is neither a module with a configuration nor a list of such.
    """
    from megatron.core.utils import get_model_config

    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    try:
        return get_model_config(chunk)
    except RuntimeError:
        raise TypeError(f"model is Megatron's model, or the list of its chunks, not {model!r}") from None


def find_unfinalized_gradients(configuration: Any) -> Iterator[Finding]:
    """A finding if the trainer, after its setup, has left the model's own configuration without a finalizer.

    NVIDIA-NeMo/Megatron-Bridge#4974: a wrapper of Bridge's Nemotron VL and Omni carries a copy of the configuration on
    which Bridge sets it, so losses per token trained with gradients that nothing divided.
    """
    if getattr(configuration, "finalize_model_grads_func", None) is None:
        yield Finding(
            id="gradients-not-finalized",
            text=_TEXT,
            kind="wrong numbers",
            severity=5,
            evidence="reproduced",
            only_if="the model is trained by Megatron's schedules, and the trainer finalizes no gradients itself",
            releases="",
            patch=None,
            is_removed=False,
            remedy=_REMEDY,
        )
