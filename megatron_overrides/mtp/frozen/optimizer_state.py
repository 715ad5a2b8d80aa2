"""The optimizer state of heads that train alone: refused where it does not fit, and saved.

In the format torch_dist each tensor is saved by a rank that has it, but plain values (learning rates, the number of
steps) are saved by the first rank, whose pipeline stage may train nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

_NOT_PLAIN = ...


def check_optimizer_state(folder: str, was_frozen: bool, is_frozen: bool) -> None:
    """Raise ValueError if the checkpoint in `folder` has the moments of other parameters than those that train now.

    Depending on the optimizer Megatron would load some of them and keep training, or raise a KeyError with thousands of
    names or a mismatch of shapes.

    Args:
        was_frozen: `--freeze-base-model-for-mtp` of the run that saved it.
        is_frozen: that of this run.
    """
    if was_frozen and not is_frozen:
        raise ValueError(
            f"The checkpoint in {folder} is of a run with --freeze-base-model-for-mtp, so it has the optimizer state "
            f"of the MTP heads alone: add --freeze-base-model-for-mtp to train them further or, to train the whole "
            f"model, --finetune (from iteration 0) or --no-load-optim"
        )
    if is_frozen and not was_frozen:
        raise ValueError(
            f"The checkpoint in {folder} is of a run without --freeze-base-model-for-mtp, so it has the optimizer "
            f"state of the whole model: to train the MTP heads alone, add --finetune (from iteration 0) or "
            f"--no-load-optim, or --mtp-init if it has no heads; to train the whole model further, leave "
            f"--freeze-base-model-for-mtp out"
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
    return state if has_heads else _put_in(shared, state)


def _plain(state: Any) -> Any:
    """Return the plain values in `state`, and _NOT_PLAIN for what has none."""
    if isinstance(state, (ShardedBase, LocalNonpersistentObject)):
        return _NOT_PLAIN
    if isinstance(state, dict):
        plain_values = {name: _plain(value) for name, value in state.items()}
        kept = {name: value for name, value in plain_values.items() if value is not _NOT_PLAIN}
        return kept if kept or not plain_values else _NOT_PLAIN
    if isinstance(state, list):
        return [_plain(value) for value in state]
    return state.cpu() if isinstance(state, torch.Tensor) else state


def _put_in(shared: Any, own: Any) -> Any:
    """Return `own` with the plain values of `shared`; lists of another length stay, and are not saved."""
    if shared is _NOT_PLAIN or isinstance(own, (ShardedBase, LocalNonpersistentObject)):
        return own
    if isinstance(shared, dict):
        own = own if isinstance(own, dict) else {}
        return own | {name: _put_in(value, own.get(name)) for name, value in shared.items()}
    if isinstance(shared, list) and isinstance(own, list):
        if len(shared) != len(own):  # lists of tensors; empty ones must not be saved as plain values
            return LocalNonpersistentObject(own)
        return [_put_in(value, mine) for value, mine in zip(shared, own, strict=True)]
    return shared
