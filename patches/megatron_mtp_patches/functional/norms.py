"""The norms of groups of gradients, and the update that they decide about, in the order of their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_overrides.norms.step_decision import StepDecision
    from megatron_overrides.norms.values import GradNorms


def is_mtp_parameter(name: str) -> bool:
    """True if a parameter belongs to the MTP heads, which Megatron's models keep in a module `mtp`.

    Args:
        name: a string of `model.named_parameters()`, of any wrapper of the model, or of its state dict.
    """
    if not isinstance(name, str):
        raise TypeError(f"is_mtp_parameter takes a name of model.named_parameters(), not a {type(name).__name__}")
    return "mtp" in name.split(".")[:-1]


def tag(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any = None,
    group: str = "mtp",
    match: Callable[[str], bool] = is_mtp_parameter,
) -> list[str]:
    """Put parameters into a norm group: `grad_norms` and `clip` then leave them out of the main norm.

    Args:
        model: the model, or its chunks.
        optimizer: what get_megatron_optimizer returned, if it was built before: without the patches, the main copies
            and shards that it has made of the parameters lack the tag. None before it is built: a Megatron before
            0.19 without the patches copies no tag, so then call this again, or only, with the optimizer.
        group: "mtp", whose settings are `mtp_clip_grad` and `mtp_grad_norm_skip_threshold`, or the name of a group in
            `optimizer.config.grad_norm_group`.
        match: takes the name of a parameter, without leading `module.`.

    Returns:
        The names of the parameters of this rank that match.

    Raises:
        TypeError: `model` is neither a torch.nn.Module nor a list of them, or `optimizer` is not a Megatron optimizer.
    """
    from megatron_overrides.norms.tags import tag_matching

    return tag_matching(model, optimizer, group, match)


def grad_norms(optimizer: Any) -> GradNorms:
    """Measure the norm of each group of gradients, with one all-reduce for each set of ranks that shares an optimizer.

    It is a collective of all ranks of the optimizer, between `optimizer.prepare_grads()` and `clip`.

    Args:
        optimizer: what get_megatron_optimizer returned, however nested.

    Returns:
        GradNorms, the same on every rank. `total`: {None: norm of the untagged gradients, "mtp": ..., ...};
        `clipping`: the same without the gradients that are exempt from clipping (Muon's). Each norm is a float or, with
        TransformerEngine >= 2.14 from Megatron 0.17 on, a one-element CUDA tensor.

    Raises:
        TypeError: `optimizer` is not a Megatron optimizer.
        ValueError: a parameter is tagged with a group that `optimizer.config` does not know.
    """
    from megatron_overrides.norms.measuring import measure
    from megatron_overrides.norms.optimizer_tree import check_optimizer

    check_optimizer(optimizer)
    return measure(optimizer)


def decide(norms: GradNorms, config: Any) -> StepDecision:
    """Compare norms with thresholds. It communicates with no rank: norms that are the same make it the same.

    Args:
        norms: of `grad_norms`.
        config: `optimizer.config`, or any object that has one or more of its settings: `clip_grad`, `mtp_clip_grad`,
            `grad_norm_skip_threshold` (missing or inf: never skip) and `mtp_grad_norm_skip_threshold` (missing or
            None: as the other). An OptimizerConfig of a Megatron without these fields can be given them as attributes.

    Returns:
        StepDecision: `skips_update`, and `skips_mtp` if only the update of the MTP heads is skipped.

    Raises:
        ValueError: a setting of `config` is not a number, or would skip every update; or no rank has a parameter of a
            group in `config.grad_norm_group`, or of the MTP heads, for which `config` has a setting.
        TypeError: not the norms of `grad_norms`, or an object that has none of these settings.
    """
    from megatron_overrides.norms.checks import check_norms_for
    from megatron_overrides.norms.step_decision import decide
    from megatron_overrides.settings.checks import check

    from ..catalog import SETTINGS_OF_OPTIMIZER

    check_norms_for(config, norms)
    check(config, SETTINGS_OF_OPTIMIZER)
    return decide(norms, config)


def clip(optimizer: Any, norms: GradNorms, decision: StepDecision | None = None) -> None:
    """Scale the gradients of each group down to its limit, and drop those that the coming update leaves out.

    The limits are `optimizer.config.clip_grad` and, if it is set, `mtp_clip_grad`. Chained optimizers whose attribute
    `skip_grad_norm_clip` is True are exempt. The patches set it for Muon; without them it has to be set.

    Args:
        optimizer: what get_megatron_optimizer returned.
        norms: of `grad_norms`.
        decision: of `decide`; None for an update of everything. With `skips_update` nothing is clipped.

    Raises:
        TypeError: one of them is something else.
    """
    from megatron_overrides.norms.checks import check_step
    from megatron_overrides.norms.optimizer_step import limit_gradients
    from megatron_overrides.norms.step_decision import StepDecision

    check_step(optimizer, norms, decision)
    limit_gradients(optimizer, norms, decision or StepDecision())


def update(optimizer: Any, norms: GradNorms, decision: StepDecision | None = None) -> bool:
    """Update the parameters after `clip`, or skip the update; returns whether they were updated.

    Args:
        optimizer: as for `clip`, which raises the same TypeError.
        norms: as for `clip`.
        decision: as for `clip`.
    """
    from megatron_overrides.norms.checks import check_step
    from megatron_overrides.norms.optimizer_step import update
    from megatron_overrides.norms.step_decision import StepDecision

    check_step(optimizer, norms, decision)
    return update(optimizer, norms, decision or StepDecision())
