"""The weight of the MTP loss in the step that runs: a trainer's wrapper sets it, whatever computes the loss reads it.

It is set where Megatron and the frameworks read it, `config.mtp_loss_scaling_factor`. A scheduled run keeps no count of
its own: iterations and samples are those of the trainer, which are right after a resume, also with --no-load-optim. The
steps of OptimizerParamScheduler, which all trainers have, leave out skipped updates, start at 0 where the state of the
optimizer is not loaded, and count samples in one trainer and batches in another. Workers of verl have no other count:
frameworks/verl_schedule.py reads it from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.model_chunks import as_list
from megatron_overrides.mtp.loss_weight.schedule import NAME, STYLE, Progress, Schedule
from megatron_overrides.settings.checks import spell

# An attribute of a configuration whose weight has been set.
_IS_SET = "_mtp_patches_set_scheduled_weight"


def set_scheduled_weight(model: Any, progress: Progress) -> None:
    """Set the weight of the step that follows `progress`, where the configuration of the model has a schedule.

    Args:
        model: as trainers have it, a module or the list of its chunks.
    """
    for config in _configurations(as_list(model)):
        text = getattr(config, NAME, None)
        if text is not None and config.mtp_num_layers:
            weight = Schedule.parse(text, getattr(config, STYLE)).weight(progress)
            config.mtp_loss_scaling_factor = weight
            setattr(config, _IS_SET, True)
            # What the log shows; a tensor, because frameworks add the entries of the log up.
            mtp.MTPLossLoggingHelper.tracker["scaling_factor"] = torch.tensor(weight, dtype=torch.float64)


def loss_weight(config: Any, is_trained: bool) -> float:
    """Return the weight of the mean loss of the heads.

    Args:
        is_trained: whether a backward pass follows, so that it matters.

    Raises:
        NotImplementedError: the configuration has a schedule, and no trainer has said which iteration this is.
    """
    if is_trained and getattr(config, NAME, None) is not None and not hasattr(config, _IS_SET):
        raise NotImplementedError(
            f"{spell(NAME)} has no effect: the patches do not know how this trainer counts its iterations (they know "
            f"Megatron-LM's train_step, Megatron-Bridge and verl, each with its patch applied). Leave it out, and set "
            f"config.mtp_loss_scaling_factor before each step"
        )
    weight: float = config.mtp_loss_scaling_factor
    return weight


def _configurations(chunks: list[torch.nn.Module]) -> Iterator[Any]:
    """Yield the configuration of the language model in each chunk; with interleaved stages each has its own."""
    for chunk in chunks:
        language_model = next((module for module in chunk.modules() if "mtp_process" in vars(module)), None)
        if language_model is not None:
            yield language_model.config
