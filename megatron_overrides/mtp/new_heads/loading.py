"""The wrappers that load a checkpoint without MTP heads into a model that has some: `--mtp-init`."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.utils import log_single_rank, unwrap_model
from megatron.training import checkpointing

from megatron_overrides.call import Call
from megatron_overrides.mtp.new_heads import initialization as new_heads
from megatron_overrides.mtp.new_heads.checkpoint import HEAD_SETTINGS, describe_other_heads, lacks_heads, name_mtp_init

logger = logging.getLogger(__name__)


def keep_settings_of_new_heads(call: Call) -> Any:
    """Wraps load_args_from_checkpoint(args, ...), which --use-checkpoint-args calls.

    Raises:
        ValueError: the checkpoint has heads, and not as many as the command line asks for.
    """
    settings = call["args"]
    asked = {name: getattr(settings, name) for name in HEAD_SETTINGS if hasattr(settings, name)}
    result = call.proceed()
    saved_arguments = result[1] if isinstance(result, tuple) else None
    if getattr(settings, "mtp_init", None) is None or saved_arguments is None:
        return result
    heads = getattr(saved_arguments, "mtp_num_layers", None)
    if not heads:
        vars(settings).update(asked)
    elif asked["mtp_num_layers"] not in (None, heads):
        raise ValueError(describe_other_heads(settings, f"{heads} MTP heads", asked["mtp_num_layers"]))
    return result


def load_main_model(call: Call) -> Any:
    """Wraps load_checkpoint(ddp_model, optimizer, ...): initializes the heads if the checkpoint has none.

    The main model is then loaded as --finetune loads a model: without iteration, random state and optimizer.

    Raises:
        ValueError: there is no checkpoint, or its format is not supported, or it has some of the heads, or, in the
            format torch, it lacks another part of the model. In the format torch_dist Megatron raises that itself.
    """
    settings = checkpointing.get_args()  # the name that Megatron's function looks up
    if getattr(settings, "mtp_init", None) is None or call["load_arg"] != "load":
        with name_mtp_init():
            return call.proceed()
    chunks = unwrap_model(call["ddp_model"])
    if not lacks_heads(chunks, settings):
        return call.proceed()
    finetune, settings.finetune = settings.finetune, True
    try:
        with new_heads.hidden_heads(chunks):
            result = call.proceed()
    finally:
        settings.finetune = finetune
    new_heads.copy_embedding_to_heads(chunks)
    if settings.mtp_init == "last-layer":
        new_heads.initialize_from_last_layer(chunks)
    if call["optimizer"] is not None:
        call["optimizer"].reload_model_params()
    log_single_rank(
        logger, logging.WARNING, f"The checkpoint has no MTP heads: they were initialized ({settings.mtp_init})"
    )
    return result
