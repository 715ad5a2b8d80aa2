"""The wrapper that sets the scheduled weight of the MTP loss before a step of Megatron's trainer."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.mtp.loss_weight.schedule import Progress
from megatron_overrides.run_arguments import arguments_of_run


def schedule_weight(call: Call) -> Any:
    """Wraps train_step(..., model, ..., iteration), which runs all microbatches of an iteration, also a second time."""
    from megatron_overrides.mtp.loss_weight.current import set_scheduled_weight

    args, iteration = arguments_of_run(), call["iteration"]
    if args is not None and iteration is not None:
        progress = Progress.of_run(iteration, args.consumed_train_samples, args.train_iters, args.train_samples)
        set_scheduled_weight(call["model"], progress)
    return call.proceed()
