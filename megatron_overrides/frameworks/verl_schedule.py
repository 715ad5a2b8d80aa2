"""verl: a schedule of the MTP loss counts the training batches of the model, also those before a resume."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.dist_checkpointing import check_is_distributed_checkpoint, load_common_state_dict
from megatron.core.utils import log_single_rank
from verl.utils.megatron_utils import get_optimizer_dist_checkpoint_path

from megatron_overrides.call import Call
from megatron_overrides.mtp.loss_weight.current import set_scheduled_weight
from megatron_overrides.mtp.loss_weight.schedule import NAME, Progress
from megatron_overrides.settings.checks import spell

logger = logging.getLogger(__name__)

# An attribute of an engine: the batches of its model, less the steps of its learning rate schedule in this process.
_BATCHES_BEFORE = "_mtp_patches_batches_before"


def schedule_weight(call: Call) -> Any:
    """Wraps TrainingWorker.train_batch(data), which steps the learning rate schedule after the last part of a batch.

    Engines of other backends have another kind of schedule.
    """
    engine = call.instance.engine
    steps = getattr(getattr(engine, "lr_scheduler", None), "num_steps", None)
    if steps is not None:
        set_scheduled_weight(engine.module, Progress(steps + getattr(engine, _BATCHES_BEFORE, 0)))
    return call.proceed()


def continue_schedule(call: Call) -> Any:
    """Wraps MegatronEngine.load_checkpoint(local_path, ...): the schedule goes on where the checkpoint was saved.

    verl saves the steps of its learning rate schedule. It loads them only with use_checkpoint_opt_param_scheduler, and
    adds them to those that the process has made.
    """
    engine = call.instance
    if getattr(engine.tf_config, NAME, None) is None:
        return call.proceed()
    folder = get_optimizer_dist_checkpoint_path(call["local_path"])
    saved = None
    if check_is_distributed_checkpoint(folder):
        saved = load_common_state_dict(folder)["lr_scheduler"]["num_steps"]
    result = call.proceed()
    if saved is not None:
        setattr(engine, _BATCHES_BEFORE, saved - engine.lr_scheduler.num_steps)
    elif not engine.optimizer_config.use_checkpoint_opt_param_scheduler:
        text = (
            f"{spell(NAME)} does not go on where this checkpoint was saved: {folder} has no state of the learning "
            f"rate schedule. Set use_checkpoint_opt_param_scheduler=true of the optimizer, or shift the points"
        )
        log_single_rank(logger, logging.WARNING, text)
    return result
