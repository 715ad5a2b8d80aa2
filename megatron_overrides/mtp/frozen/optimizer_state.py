"""The optimizer state where a part of the model trains alone: refused where it does not fit, and saved.

In the format torch_dist each tensor is saved by a rank that has it, but plain values (learning rates, the number of
steps) are saved by the first rank, whose pipeline stage may train nothing.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from megatron_overrides.call import Call
from megatron_overrides.mtp.blocks import mtp_blocks
from megatron_overrides.mtp.frozen.trained_parts import TrainedParts, is_main_model_frozen
from megatron_overrides.scoped import scoped

# Whether load_checkpoint is running for a model with an optimizer. Others read checkpoints by the same function.
_loads_optimizer: ContextVar[bool] = ContextVar("loads_optimizer", default=False)
_NOT_PLAIN = ...


class _PartlyPlain(list[Any]):
    """The plain values of a list that also has tensors: it stays with the stages that have such a list."""


def share_state_of_heads(call: Call) -> dict[str, Any]:
    """Wraps generate_state_dict(args, model, optimizer, ...), which lays out what is saved and what is loaded."""
    state: dict[str, Any] = call.proceed()
    settings = call["args"]
    has_optimizer = call.get("optimizer") is not None and not settings.no_save_optim
    is_split = settings.ckpt_format == "torch_dist" and settings.pipeline_model_parallel_size > 1
    if has_optimizer and is_split and is_main_model_frozen(settings):
        has_heads = any(True for _ in mtp_blocks(call["model"]))
        state["optimizer"] = share_plain_values(state.get("optimizer"), has_heads)
    return state


def watch_for_other_state(call: Call) -> Any:
    """Wraps load_checkpoint(ddp_model, optimizer, ...): only with an optimizer can its state be another one."""
    with scoped(_loads_optimizer, call.get("optimizer") is not None):
        return call.proceed()


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
        check_optimizer_state(call["load_dir"], TrainedParts.read(saved), TrainedParts.read(settings))
    return result


def check_optimizer_state(folder: str, saved: TrainedParts, current: TrainedParts) -> None:
    """Raise ValueError if the checkpoint in `folder` has the moments of other parameters than those that train now.

    Depending on the optimizer Megatron would load some of them and keep training, or raise a KeyError with thousands of
    names or a mismatch of shapes. Megatron itself refuses what no flag of the two runs has changed.
    """
    if saved[:2] == current[:2] or not (saved.flag or current.flag):
        return
    with_flag = f"with {saved.flag}" if saved.flag else f"without {current.flag}"
    as_before = f"add {saved.flag}" if saved.flag else f"leave {current.flag} out"
    new_heads = "" if current.trains_main_model else ", or --mtp-init if it has no heads"
    raise ValueError(
        f"The checkpoint in {folder} is of a run {with_flag}, so it has the optimizer state of {saved}: to train on as "
        f"before, {as_before}; to train {current}, which makes all optimizer state new, add --finetune (from iteration "
        f"0) or --no-load-optim{new_heads}"
    )


def share_plain_values(state: Any, has_heads: bool) -> Any:
    """Return `state` with the plain values of the pipeline stage that has the heads. A collective over the stages.

    Args:
        state: the sharded state dict of this stage's optimizer, or None.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, _plain(state) if has_heads else None, group=group)
    shared = next((plain for plain in stages if plain is not None), _NOT_PLAIN)
    return state if has_heads else _merge_plain(shared, state)


def _plain(state: Any) -> Any:
    """Return the plain values in `state`, and _NOT_PLAIN for what has none."""
    if isinstance(state, (ShardedBase, LocalNonpersistentObject)):
        return _NOT_PLAIN
    if isinstance(state, dict):
        plain_values = {name: _plain(value) for name, value in state.items()}
        kept = {name: value for name, value in plain_values.items() if value is not _NOT_PLAIN}
        return kept if kept or not plain_values else _NOT_PLAIN
    if isinstance(state, list):
        values = [_plain(value) for value in state]
        return values if _is_plain(state) else _PartlyPlain(values)
    return state.cpu() if isinstance(state, torch.Tensor) else state


def _is_plain(state: Any) -> bool:
    if isinstance(state, (ShardedBase, LocalNonpersistentObject)):
        return False
    if isinstance(state, dict):
        return all(map(_is_plain, state.values()))
    return all(map(_is_plain, state)) if isinstance(state, list) else True


def _merge_plain(shared: Any, own: Any) -> Any:
    """Return `own` with the plain values of `shared`; lists of another length stay, and are not saved.

    What neither of them has is _NOT_PLAIN.
    """
    if shared is _NOT_PLAIN or isinstance(own, (ShardedBase, LocalNonpersistentObject)):
        return own
    if isinstance(shared, dict):
        own = own if isinstance(own, dict) else {}
        merged = own | {name: _merge_plain(value, own.get(name, _NOT_PLAIN)) for name, value in shared.items()}
        return {name: value for name, value in merged.items() if value is not _NOT_PLAIN}
    if isinstance(shared, list) and isinstance(own, list):
        if len(shared) != len(own):  # lists of tensors; empty ones must not be saved as plain values
            return LocalNonpersistentObject(own)
        return [_merge_plain(value, mine) for value, mine in zip(shared, own, strict=True)]
    return own if isinstance(shared, _PartlyPlain) else shared
