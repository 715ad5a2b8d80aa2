"""Load checkpoints without MTP heads into models that have some (`--mtp-init`); save and resume heads that train."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import log_single_rank, unwrap_model
from megatron.training import checkpointing

from megatron_overrides.call import Call
from megatron_overrides.mtp.frozen.frozen_main_model import heads_of
from megatron_overrides.mtp.frozen.optimizer_state import check_optimizer_state, share_plain_values
from megatron_overrides.mtp.new_heads import initialization as new_heads
from megatron_overrides.settings.model_settings import is_main_model_frozen

logger = logging.getLogger(__name__)

_HEAD = re.compile(r"(?:module\.)*mtp\.layers\.(\d+)\.")
# Whether load_checkpoint is running for a model with an optimizer. Others read checkpoints by the same function.
_loads_optimizer: ContextVar[bool] = ContextVar("load_checkpoint has an optimizer", default=False)
# What `load_args_from_checkpoint` sets, although a checkpoint without heads has no say in it.
_OF_HEADS = ("mtp_num_layers", "mtp_use_repeated_layer", "mtp_hybrid_override_pattern")


def keep_settings_of_new_heads(call: Call) -> Any:
    """Wraps load_args_from_checkpoint(args, ...), which --use-checkpoint-args calls.

    Raises:
        ValueError: the checkpoint has heads, and not as many as the command line asks for.
    """
    settings = call["args"]
    asked = {name: getattr(settings, name) for name in _OF_HEADS if hasattr(settings, name)}
    result = call.proceed()
    of_checkpoint = result[1] if isinstance(result, tuple) else None
    if getattr(settings, "mtp_init", None) is None or of_checkpoint is None:
        return result
    heads = getattr(of_checkpoint, "mtp_num_layers", None)
    if not heads:
        vars(settings).update(asked)
    elif asked["mtp_num_layers"] not in (None, heads):
        raise ValueError(_some_heads(settings, f"{heads} MTP heads", asked["mtp_num_layers"]))
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
        with _name_mtp_init():
            return call.proceed()
    chunks = unwrap_model(call["ddp_model"])
    if not _lacks_heads(chunks, settings):
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


@contextmanager
def _name_mtp_init() -> Iterator[None]:
    """Add a note to Megatron's error if it misses tensors of MTP heads (Python 3.10 has no notes)."""
    try:
        yield
    except BaseException as error:  # as torch's CheckpointException is
        if "mtp.layers." in str(error) and hasattr(error, "add_note"):
            error.add_note("If the checkpoint has no MTP heads, --mtp-init initializes them.")
        raise


def share_state_of_heads(call: Call) -> dict[str, Any]:
    """Wraps generate_state_dict(args, model, optimizer, ...), which lays out what is saved and what is loaded."""
    state: dict[str, Any] = call.proceed()
    settings = call["args"]
    has_optimizer = call.get("optimizer") is not None and not settings.no_save_optim
    is_split = settings.ckpt_format == "torch_dist" and settings.pipeline_model_parallel_size > 1
    if has_optimizer and is_split and is_main_model_frozen(settings):
        has_heads = any(True for _ in heads_of(call["model"]))
        state["optimizer"] = share_plain_values(state.get("optimizer"), has_heads)
    return state


def watch_for_other_state(call: Call) -> Any:
    """Wraps load_checkpoint(ddp_model, optimizer, ...): only with an optimizer its state can be another one."""
    token = _loads_optimizer.set(call.get("optimizer") is not None)
    try:
        return call.proceed()
    finally:
        _loads_optimizer.reset(token)


def refuse_other_state(call: Call) -> Any:
    """Wraps _load_base_checkpoint(load_dir, args, ...), which returns (state dict or None, name, is a release, ...).

    In the format torch_dist load_checkpoint calls it twice: for what all ranks share, the arguments of the saved run
    among it, and then for the tensors.

    Raises:
        ValueError: the optimizer state of other parameters would be loaded.
    """
    result = call.proceed()
    settings, (state, _, is_release, *_) = call["args"], result
    saved = (state or {}).get("args")
    loads_state = _loads_optimizer.get() and not (is_release or settings.finetune or settings.no_load_optim)
    if loads_state and saved is not None:
        check_optimizer_state(call["load_dir"], is_main_model_frozen(saved), is_main_model_frozen(settings))
    return result


def _lacks_heads(chunks: Sequence[Any], settings: Any) -> bool:
    """Whether the checkpoint that load_checkpoint is about to load has no heads at all."""
    base, file = _find_checkpoint(settings)
    names: Iterable[str] = ()
    missing: set[str] = set()
    is_readable = True
    if dist_checkpointing.check_is_distributed_checkpoint(base):
        names = torch.distributed.checkpoint.FileSystemReader(base).read_metadata().state_dict_metadata
    elif Path(file).is_file():
        names, missing = _read_names(file, chunks)
    else:
        is_readable = False
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (_depths(names), missing, is_readable))
    depths = set().union(*(each for each, _, _ in found))
    missing = set().union(*(each for _, each, _ in found))
    if not all(is_readable for _, _, is_readable in found):
        raise ValueError(
            f"--mtp-init reads checkpoints of the formats torch_dist and torch, and {base} has neither the first nor a "
            f"file of the second for each rank: convert it to torch_dist, which fits any parallel layout"
        )
    needed = _needed_depths(settings)
    if depths and not depths >= needed:
        raise ValueError(_some_heads(settings, f"only the MTP heads {sorted(depths)}", len(needed)))
    if missing and (depths or not all(map(_HEAD.match, missing))):
        shown = ", ".join(sorted(name for name in missing if depths or not _HEAD.match(name))[:5])
        raise ValueError(
            f"--mtp-init replaces all MTP heads and nothing else, but the checkpoint in {base} lacks {shown}"
        )
    return not depths


def _find_checkpoint(settings: Any) -> tuple[str, str]:
    """Return the folder that load_checkpoint reads, and this rank's file in it if the format is torch."""
    from megatron.training import checkpointing

    folders = (settings.load, getattr(settings, "pretrained_checkpoint", None))
    folder = next(filter(checkpointing.checkpoint_exists, folders), None)
    if folder is None:
        raise ValueError(
            "--mtp-init starts from a trained model, and there is no checkpoint in "
            + " or ".join(str(folder) for folder in folders if folder)
        )
    iteration, release = checkpointing.read_metadata(checkpointing.get_checkpoint_tracker_filename(folder))
    iteration = getattr(settings, "ckpt_step", None) or iteration
    base, file = (
        checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=is_base)
        for is_base in (True, False)
    )
    return base, file


def _read_names(file: str, chunks: Sequence[Any]) -> tuple[set[str], set[str]]:
    """Return the names in this rank's file, and those of the model that it lacks."""
    state = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    keys = ["model"] if len(chunks) == 1 else [f"model{place}" for place in range(len(chunks))]
    names, missing = set(), set()
    for key, chunk in zip(keys, chunks, strict=True):
        of_chunk = set(state.get(key, ()))
        names |= of_chunk
        wanted = {name for name in chunk.state_dict_for_save_checkpoint() if not name.endswith("_extra_state")}
        if getattr(chunk, "mtp_process", False) and not chunk.pre_process:
            wanted = {name for name in wanted if not name.startswith("embedding.")}
        missing |= wanted - of_chunk
    return names, missing


def _depths(names: Iterable[str]) -> set[int]:
    """The depths of the heads that some names of tensors belong to; those of an optimizer begin with another word."""
    return {int(head[1]) for head in map(_HEAD.match, names) if head}


def _needed_depths(settings: Any) -> set[int]:
    count = settings.mtp_num_layers or 0
    if not count:
        raise ValueError("--mtp-init initializes MTP heads, and the model has none: add --mtp-num-layers")
    return {0} if getattr(settings, "mtp_use_repeated_layer", False) else set(range(count))


def _some_heads(settings: Any, found: str, needed: int) -> str:
    return (
        f"--mtp-init {settings.mtp_init} initializes all {needed} MTP heads, but the checkpoint has {found}: set "
        f"--mtp-num-layers to what it has, or load a checkpoint without heads"
    )
