"""The loss of MTP heads, their acceptance, and the roll that makes their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_overrides.mtp.losses.head_losses import MTPLoss


def mtp_loss(
    main_hidden: Tensor,
    head_hiddens: Sequence[Tensor],
    labels: Tensor,
    loss_mask: Tensor,
    output_layer: Callable[..., Any],
    *,
    loss_type: str = "cross_entropy",
    depth_weights: Sequence[float] | None = None,
    position_weights: str = "equal",
    dpace_alpha: float = 0.5,
    scaling_factor: float = 1.0,
    chunk_size: int = 0,
    measure: bool = False,
    detach_output_layer: bool = False,
    output_weight: Tensor | None = None,
    gather_output: bool | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    cross_entropy: Callable[[Tensor, Tensor], Tensor] | None = None,
    vocab_size: int | None = None,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    cp_group: Any = None,
    packed_seq_params: Any = None,
) -> MTPLoss:
    """Compute the loss of D MTP heads, and on request their acceptance rates and accepted lengths.

    No gradient reaches `main_hidden`. To keep the loss out of the main model, give heads that were computed from its
    detached hidden states, and set `detach_output_layer`.

    Args:
        main_hidden: [s, b, h], the hidden states of the main model, with which all losses but cross entropy compare
            the heads.
        head_hiddens: D times [s, b, h], those of each head. Head d (from 1) at position t predicts token t + d + 1.
        labels: [b, s] int64, the labels of the main model: label t is token t + 1. `roll(tokens)` makes them of tokens.
        loss_mask: [b, s], 1 where a label of the main model counts. A label of -100 counts unless it is masked here.
        output_layer: called (hidden [s, b, h], weight=, runtime_gather_output=), returns (logits [s, b, v], bias), as
            Megatron's.
        loss_type: cross_entropy, kl, tv, e2e_tv (NVIDIA/Megatron-LM#6473, arXiv 2606.12370) or lk (arXiv 2602.23881).
        depth_weights: D weights, divided by their mean.
        position_weights: equal or, with cross entropy, dpace (arXiv 2605.18810).
        dpace_alpha: above 0, up to 1.
        scaling_factor: what the mean over the heads is multiplied by, as by `mtp_loss_scaling_factor`.
        chunk_size: rows of logits at a time; 0 makes those of all positions for the cross entropy, and 1024 otherwise.
        measure: also measure the acceptance rates and accepted lengths.
        detach_output_layer: the loss trains neither `output_layer`, which must be a torch.nn.Module then, nor
            `output_weight`.
        output_weight: the tied embedding; None if the output layer has a weight.
        gather_output: given to the output layer as `runtime_gather_output`; None is its own choice.
        scale_logits: what scales the logits (MuP).
        cross_entropy: (labels [b, s], logits [s, b, v]) -> loss [b, s]; None: Megatron's vocab_parallel_cross_entropy.
        vocab_size: the number of tokens; logits beyond pad the vocabulary. None: no logits do.
        tp_group: over which the logits are cut; None asks the output layer, then Megatron.
        sequence_parallel: hidden states are [s / tp, b, h].
        cp_group: over which the sequences are cut, as Megatron cuts them; None is one rank. Then it is a collective.
        packed_seq_params: Megatron's PackedSeqParams, with or without padding.

    Returns:
        An MTPLoss: `loss`, a scalar to add to the loss of the main model, for trainers that average gradients over
        data- and context-parallel ranks: its average over `cp_group` is the mean over the positions of all its ranks.
        `metrics`, sums over those of this rank; `means(group)`, their means by name over the ranks of a group.

    Raises:
        ValueError: shapes, a loss type, weights, alpha or a number of tokens that are invalid.
        TypeError: the output layer does not take `weight` and `runtime_gather_output`.
    """
    from functools import partial
    from types import SimpleNamespace

    # First: while it is imported, the patches import the overrides below.
    import megatron.core.transformer.multi_token_prediction  # noqa: F401

    from megatron_overrides.mtp.losses import checks, head_losses
    from megatron_overrides.mtp.losses.head_settings import HeadSettings
    from megatron_overrides.mtp.losses.projection import Projection
    from megatron_overrides.mtp.packed.padded_roll import roll_to_next
    from megatron_overrides.settings.checks import check

    from ..mtp.chunk_mtp_logits import CHUNK_SIZE
    from ..mtp.train_mtp_heads_for_acceptance import DPACE_ALPHA, LOSS_TYPE, POSITION_WEIGHTS

    heads = list(head_hiddens)
    checks.check_shapes(main_hidden, heads, labels, loss_mask, sequence_parallel)
    config = SimpleNamespace(
        mtp_loss_type=loss_type,
        mtp_position_weights=position_weights,
        mtp_dpace_alpha=dpace_alpha,
        mtp_logits_chunk_size=chunk_size,
        mtp_num_layers=len(heads),
    )
    check(config, (LOSS_TYPE, POSITION_WEIGHTS, DPACE_ALPHA, CHUNK_SIZE))
    weights = checks.depth_weights(depth_weights, len(heads))
    checks.check_output_layer(output_layer, vocab_size, detach_output_layer and output_weight is None)
    roll_once = partial(roll_to_next, packed_seq_params=packed_seq_params, cp_group=cp_group)
    projection = Projection.create(
        output_layer,
        weight=output_weight,
        runtime_gather_output=gather_output,
        scale=scale_logits,
        tp_group=tp_group,
        is_detached=detach_output_layer,
        vocab_size=vocab_size,
        is_sequence_parallel=sequence_parallel,
    )
    settings = HeadSettings.create(
        loss_type, weights, checks.dpace_alpha(config), chunk_size, counts_labels=measure, measures_lengths=measure
    )
    losses = head_losses.head_losses(
        main_hidden,
        heads,
        labels,
        loss_mask,
        roll_once,
        projection,
        cross_entropy or head_losses.vocab_parallel_cross_entropy,
        settings,
        scaling_factor,
        cp_group,
        packed_seq_params,
    )
    return head_losses.MTPLoss.average(losses, cp_group)


def roll(tensor: Tensor, packed_seq_params: Any = None, cp_group: Any = None) -> Tensor:
    """Put what belongs to the next token of its sequence into each slot, and 0 where there is none.

    Args:
        tensor: [..., s], tokens, labels or a mask, on this rank of `cp_group`.
        packed_seq_params: Megatron's PackedSeqParams, with or without padding; None for one sequence in a row.
        cp_group: over which the sequences are cut, as Megatron cuts them; None is one rank. Then it is a collective.

    Returns:
        A new tensor of the same shape and dtype. Slots after the last packed sequence are 0.

    Raises:
        TypeError: `tensor` is not a tensor, or is a scalar.
        ValueError: the packed sequences have more slots than the tensor.
    """
    from megatron_overrides.mtp.packed.padded_roll import check_tensor, roll_to_next

    check_tensor(tensor)
    return roll_to_next(tensor, packed_seq_params, cp_group)[0]


def acceptance(logits: Tensor, labels: Tensor, loss_mask: Tensor, tp_group: Any = None) -> tuple[Tensor, Tensor]:
    """Count how often the most likely token of an MTP head is the label (NVIDIA/Megatron-LM#3458).

    Args:
        logits: [s, b, v]; with `tp_group`, [s, b, v / tp], the part of this rank.
        labels: [b, s] int64, those of the head: for head d, the labels of the main model rolled d times.
        loss_mask: [b, s], 1 where a position counts.
        tp_group: over which the logits are cut. Then it is a collective.

    Returns:
        (correct, total), int64 scalars, of this rank's positions; the same on all ranks of `tp_group`.

    Raises:
        ValueError: other shapes.
    """
    from megatron_overrides.mtp.metrics import acceptance

    acceptance.check_shapes(logits, labels, loss_mask)
    return acceptance._compute_mtp_acceptance_counts(logits, labels, loss_mask, None, tp_group is None, tp_group)
