"""Read from a checkpoint whether it has the MTP heads of a model: all, none, or some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.training import checkpointing

_HEAD = re.compile(r"(?:module\.)*mtp\.layers\.(\d+)\.")
# What `load_args_from_checkpoint` sets, although a checkpoint without heads cannot know it.
HEAD_SETTINGS = ("mtp_num_layers", "mtp_use_repeated_layer", "mtp_hybrid_override_pattern")


@contextmanager
def name_mtp_init() -> Iterator[None]:
    """Add a note to Megatron's error if it misses tensors of MTP heads (Python 3.10 has no notes)."""
    try:
        yield
    except BaseException as error:  # as torch's CheckpointException is
        if "mtp.layers." in str(error) and hasattr(error, "add_note"):
            error.add_note("If the checkpoint has no MTP heads, --mtp-init initializes them.")
        raise


def lacks_heads(chunks: Sequence[Any], settings: Any) -> bool:
    """True if the checkpoint that load_checkpoint is about to load has no heads at all."""
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
    rank_contents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_contents, (_depths(names), missing, is_readable))
    depths = set().union(*(each for each, _, _ in rank_contents))
    missing = set().union(*(each for _, each, _ in rank_contents))
    if not all(is_readable for _, _, is_readable in rank_contents):
        raise ValueError(
            f"--mtp-init reads checkpoints of the formats torch_dist and torch, and {base} has neither the first nor a "
            f"file of the second for each rank: convert it to torch_dist, which fits any parallel layout"
        )
    needed = _needed_depths(settings)
    if depths and not depths >= needed:
        raise ValueError(describe_other_heads(settings, f"only the MTP heads {sorted(depths)}", len(needed)))
    if missing and (depths or not all(map(_HEAD.match, missing))):
        shown = ", ".join(sorted(name for name in missing if depths or not _HEAD.match(name))[:5])
        raise ValueError(
            f"--mtp-init replaces all MTP heads and nothing else, but the checkpoint in {base} lacks {shown}"
        )
    return not depths


def _find_checkpoint(settings: Any) -> tuple[str, str]:
    """Return the folder that load_checkpoint reads, and this rank's file in it if the format is torch."""

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
        chunk_names = set(state.get(key, ()))
        names |= chunk_names
        wanted = {name for name in chunk.state_dict_for_save_checkpoint() if not name.endswith("_extra_state")}
        if getattr(chunk, "mtp_process", False) and not chunk.pre_process:
            wanted = {name for name in wanted if not name.startswith("embedding.")}
        missing |= wanted - chunk_names
    return names, missing


def _depths(names: Iterable[str]) -> set[int]:
    """The depths of the heads that some names of tensors belong to; those of an optimizer begin with another word."""
    return {int(head[1]) for head in map(_HEAD.match, names) if head}


def _needed_depths(settings: Any) -> set[int]:
    count = settings.mtp_num_layers or 0
    if not count:
        raise ValueError("--mtp-init initializes MTP heads, and the model has none: add --mtp-num-layers")
    return {0} if getattr(settings, "mtp_use_repeated_layer", False) else set(range(count))


def describe_other_heads(settings: Any, heads: str, needed: int) -> str:
    return (
        f"--mtp-init {settings.mtp_init} initializes all {needed} MTP heads, but the checkpoint has {heads}: set "
        f"--mtp-num-layers to what it has, or load a checkpoint without heads"
    )
