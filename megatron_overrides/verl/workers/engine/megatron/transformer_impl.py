"""Let verl go on after an update that was skipped."""

from __future__ import annotations

from typing import Any

from megatron_overrides.support.step_record import record_of


def return_from_skipped_update(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps MegatronEngine.optimizer_step, which raises NotImplementedError where the optimizer made no update.

    Returns:
        The gradient norm; None if none was measured, because the loss scaler found inf or NaN.
    """
    try:
        return wrapped(*args, **kwargs)
    except NotImplementedError:
        record = record_of(instance.optimizer)
        if not record.decision.skips_update:
            raise
        return None if record.norms is None else record.norms.total[None]
