"""Refuse losses of MTP heads that cannot be computed: by their settings, or from the arguments of a trainer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_overrides.settings.checks import refuse_others, spell

# The paper's (arXiv 2605.18810).
DPACE_ALPHA = 0.5


def check_losses(settings: Any) -> None:
    """Raise ValueError if the losses of the heads need heads, another output layer, or weights that do not fit them."""
    if getattr(settings, "mtp_loss_type", "cross_entropy") != "cross_entropy":
        _refuse_deferred_calls(settings, "mtp_loss_type")
    _check_heads(settings, "mtp_loss_type", "cross_entropy")
    weights = getattr(settings, "mtp_depth_weights", None)
    # mcore-bridge counts a shared head once
    depths = getattr(settings, "mtp_unroll_steps", None) or getattr(settings, "mtp_num_layers", None)
    if weights is not None and depths:
        depth_weights(weights, depths)


def check_chunks(settings: Any) -> None:
    """Raise ValueError if the output layer cannot be called chunk by chunk."""
    if getattr(settings, "mtp_logits_chunk_size", 0):
        _refuse_deferred_calls(settings, "mtp_logits_chunk_size")


def _refuse_deferred_calls(settings: Any, name: str) -> None:
    deferred = ("defer_embedding_wgrad_compute", False, "keeps the input of each of its calls for later")
    refuse_others(settings, name, "calls the output layer chunk by chunk", deferred)


def check_position_weights(settings: Any) -> None:
    """Raise ValueError if the weights of the positions need heads, or another loss or alpha."""
    _check_heads(settings, "mtp_position_weights", "equal")
    dpace_alpha(settings)


def _check_heads(settings: Any, name: str, default: str) -> None:
    value = getattr(settings, name, default)
    if value != default and not getattr(settings, "mtp_num_layers", None) and "verl" not in sys.modules:
        raise ValueError(f"{spell(name)} {value} requires MTP heads: add {spell('mtp_num_layers')}")


def check_token_counts(settings: Any) -> None:
    """Raise ValueError if the model's context-parallel ranks have parts of different sequences."""
    mtp = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if not getattr(settings, "hybrid_context_parallel", False) or not getattr(settings, "mtp_num_layers", None):
        return
    if hasattr(mtp, "sum_token_counts"):
        raise ValueError(
            f"{spell('hybrid_context_parallel')} deals each sequence to a separate group of ranks, but MTP heads roll "
            f"their labels, and count-mtp-tokens-over-ranks counts their tokens, over the context-parallel group of "
            f"the model: leave the flag out, train without {spell('mtp_num_layers')}, or leave out the patch "
            f"(MEGATRON_MTP_PATCHES=-count-mtp-tokens-over-ranks; the heads then train as upstream's do)"
        )


def depth_weights(weights: str | Sequence[float] | None, depths: int) -> tuple[float, ...]:
    """Return the weight of each depth, divided by the mean of all.

    Args:
        weights: numbers, or a string of them with commas; None for equal weights.

    Raises:
        ValueError: it is not one finite number for each depth, or one is negative, or all are 0.
    """
    if weights is None:
        return (1.0,) * depths
    words = weights.split(",") if isinstance(weights, str) else list(weights)
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != depths or not all(0 <= number < float("inf") for number in numbers) or not sum(numbers):
        raise ValueError(
            f"{spell('mtp_depth_weights')} {weights}: give one weight for each of the {depths} MTP layers, not "
            f"negative and not all 0, with commas between them"
        )
    mean = sum(numbers) / depths
    return tuple(number / mean for number in numbers)


def dpace_alpha(settings: Any) -> float | None:
    """Return alpha of the D-PACE weights, None where the positions of a head weigh the same.

    Raises:
        ValueError: it is not above 0 and up to 1 (at 0 a head that knows nothing has the weight 0 and learns nothing);
            the loss is no cross entropy, whose exponential the weights are made of; or there are no such weights.
    """
    weights = getattr(settings, "mtp_position_weights", "equal")
    alpha = getattr(settings, "mtp_dpace_alpha", DPACE_ALPHA)
    if weights == "equal":
        if alpha != DPACE_ALPHA:
            raise ValueError(
                f"{spell('mtp_dpace_alpha')} {alpha} has no effect without {spell('mtp_position_weights')} dpace: add "
                f"that, or leave it out"
            )
        return None
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ValueError(f"{spell('mtp_dpace_alpha')} {alpha!r}: give a number above 0, up to 1")
    loss_type = getattr(settings, "mtp_loss_type", "cross_entropy")
    if loss_type != "cross_entropy":
        raise ValueError(
            f"{spell('mtp_position_weights')} {weights} weighs cross entropy, but {spell('mtp_loss_type')} is "
            f"{loss_type}: leave one of the two out"
        )
    return alpha


def check_shapes(
    main: torch.Tensor,
    heads: Sequence[torch.Tensor],
    labels: torch.Tensor,
    mask: torch.Tensor,
    is_sequence_parallel: bool,
) -> None:
    """Raise ValueError unless the shapes are those that `head_losses` takes."""
    if not heads:
        raise ValueError("mtp_loss: head_hiddens is empty; give the hidden states [s, b, h] of each MTP head")
    if not isinstance(main, torch.Tensor) or main.dim() != 3:
        value = f"of the shape {list(main.shape)}" if isinstance(main, torch.Tensor) else repr(main)
        raise ValueError(f"mtp_loss: main_hidden is {value}; give the hidden states [s, b, h] of the main model")
    for depth, head in enumerate(heads, start=1):
        if not isinstance(head, torch.Tensor):
            raise ValueError(f"mtp_loss: head_hiddens has {head!r}; give the hidden states [s, b, h] of each MTP head")
        if head.shape != main.shape:
            raise ValueError(
                f"mtp_loss: the hidden states of head {depth} have the shape {list(head.shape)}, those of the main "
                f"model have {list(main.shape)}"
            )
    if isinstance(labels, torch.Tensor) and labels.dtype != torch.int64:
        raise ValueError(f"mtp_loss: labels have the dtype {labels.dtype}; give token numbers in int64")
    length, batch = main.shape[:2]
    for name, tensor in (("labels", labels), ("loss_mask", mask)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"mtp_loss: {name} is {tensor!r}; give a tensor [b, s]")
        fits = tensor.dim() == 2 and tensor.size(0) == batch and tensor.shape == labels.shape
        if not fits or (tensor.size(1) % length if is_sequence_parallel else tensor.size(1) != length):
            raise ValueError(
                f"mtp_loss: {name} has the shape {list(tensor.shape)}; for hidden states {list(main.shape)} give "
                f"labels and loss_mask [b, s], b = {batch}"
            )


def check_output_layer(output_layer: Callable[..., Any], vocab_size: int | None, must_be_module: bool) -> None:
    """Check what makes logits of hidden states.

    Args:
        vocab_size: a number of tokens, or None where each column of the logits is a token.

    Raises:
        TypeError: the output layer does not take the arguments that Megatron's takes.
        ValueError: it has to be a torch.nn.Module, or `vocab_size` is not a number of tokens.
    """
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1):
        raise ValueError(
            f"mtp_loss: vocab_size is {vocab_size!r}; give the number of tokens, or None if each column of the logits "
            f"is one"
        )
    if must_be_module and not hasattr(output_layer, "parameters"):
        raise ValueError("mtp_loss: detach_output_layer needs an output_layer that is a torch.nn.Module")
    call = getattr(output_layer, "forward", output_layer)
    try:
        inspect.signature(call).bind(None, weight=None, runtime_gather_output=None)
    except TypeError as error:
        raise TypeError(
            f"mtp_loss: output_layer is called (hidden, weight=, runtime_gather_output=) and returns (logits, bias), "
            f"but {type(output_layer).__name__} does not take that: {error}. Wrap it in a module that does"
        ) from error
