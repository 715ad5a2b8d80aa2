"""The wrappers that have Muon orthogonalize each matrix of a fused weight by itself.

NVIDIA/Megatron-LM#6688 (gate and up), #6326 (heads): the parameters are marked before the optimizer copies them, the
copies keep the mark, and Muon cuts the momentum of what is marked. Nothing else in the optimizer knows of it, so states
and checkpoints stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.muon.fused_weights.rows import FUSED_ROWS, orthogonalize_pieces
from megatron_overrides.settings.checks import spell


def mark_fused_weights(call: Call) -> Any:
    """Wraps get_megatron_muon_optimizer of 0.16 and 0.17, and _get_megatron_emerging_optimizer of 0.18 and later.

    Raises:
        ValueError: on all ranks alike, if there is nothing to split or a weight of some rank cannot be split.
    """
    if "model_chunks" not in call.parameters:  # from 0.18 on the first passes all on to the other
        return call.proceed()
    from megatron_overrides.muon.fused_weights.checks import MAKES_MUON, asked_splits, check_muon_splits

    config = call["config"]
    splits = asked_splits(config)
    if splits and "layer_wise_distributed_optimizer" in call.parameters:  # it makes Muon, and renames the configuration
        setattr(config, MAKES_MUON, True)
    check_muon_splits(config)
    if splits:
        _mark(call["model_chunks"], config, splits, call["pg_collection"])
    return call.proceed()


def _mark(model_chunks: list[Any], config: Any, splits: list[str], process_groups: Any) -> None:
    from megatron_overrides.model_ranks import is_on_any_rank
    from megatron_overrides.muon.fused_weights.checks import SPLITS
    from megatron_overrides.muon.fused_weights.layers import CannotSplitError, fused_weights

    in_batches = _takes_batches() and not getattr(config, "muon_use_syrk", False)
    for setting in splits:
        problem, weights = "", []
        try:
            weights = [weight for chunk in model_chunks for weight in fused_weights(chunk, setting)]
        except CannotSplitError as error:
            problem = str(error)
        if is_on_any_rank(bool(problem), process_groups):
            raise ValueError(f"{spell(setting)}: {problem or 'another rank has a weight that it cannot split'}")
        if not is_on_any_rank(bool(weights), process_groups):
            raise ValueError(f"{spell(setting)} has nothing to split: the model has no {SPLITS[setting]}. Leave it out")
        for one in weights:
            setattr(one.weight, FUSED_ROWS, one.rows._replace(in_batches=in_batches))


def _takes_batches() -> bool:
    """True if the installed emerging_optimizers orthogonalizes several matrices in one call (from 0.3 on)."""
    try:
        from emerging_optimizers.orthogonalized_optimizers import muon_utils
    except ImportError:
        return False
    return hasattr(muon_utils, "batched_newton_schulz_step")


def copy_fused_rows(call: Call) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source): the main copy of a fused weight is one."""
    call.proceed()
    rows = getattr(call["source_tensor"], FUSED_ROWS, None)
    if rows is not None:
        setattr(call["destination_tensor"], FUSED_ROWS, rows)


def orthogonalize_each_matrix(call: Call) -> torch.Tensor:
    """Wraps TensorParallelMuon.orthogonalize(p, grad): each matrix of a marked weight by itself, scaled by its size.

    A head is whole on its rank, so no tensor-parallel group takes part. What is on all ranks, as the gate of an MLP,
    goes through Megatron's own method, which gathers it as `--muon-tp-mode` says.
    """
    rows = getattr(call["p"], FUSED_ROWS, None)
    if rows is None:
        return call.proceed()

    def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
        if rows.is_each_group_alone:
            return call.instance.scaled_orthogonalize_fn(matrix, None, None)
        call["grad"] = matrix
        return call.proceed()

    return orthogonalize_pieces(call["grad"], rows, orthogonalize)
