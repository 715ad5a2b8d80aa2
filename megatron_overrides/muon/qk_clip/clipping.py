"""QK clipping of all attention layers: replacements and wrappers of Megatron's functions.

Megatron's clip_qk visits `decoder.layers` of a model in two wrappers; here every attention layer below a model chunk is
visited, also in MTP heads and hybrid models.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.muon.qk_clip.checks import check_graphs, check_run, check_weights
from megatron_overrides.muon.qk_clip.rule import row_factors, shares_group_between_ranks
from megatron_overrides.muon.qk_clip.weights import remember, scale_rows
from megatron_overrides.norms.step_state import last_step_state

_LARGEST = "current_max_attn_logits"
_REPORTS_NOTHING = (
    "%s of layer %s does not report its largest logits, as TransformerEngine's attention does "
    "(--transformer-impl transformer_engine)"
)
logger = logging.getLogger(__name__)


def clip_qk(model: list[torch.nn.Module], log_max_only: bool = False) -> float:
    """Scale the weights of heads whose largest logit of this step is over `qk_clip_threshold`; return the largest.

    One all-reduce over data-parallel and context-parallel ranks for all layers of this rank, one of a number over
    tensor-parallel and pipeline ranks, and one transfer to the host; where tensor-parallel ranks share query groups, an
    all-gather for each layer. A layer with a logit that is not finite is left as it is.

    Args:
        model: chunks in any wrappers.
        log_max_only: leave the weights as they are.

    Returns:
        The largest logit of all layers and ranks, at least 0.

    Raises:
        ValueError: a layer has no weights that can be scaled, or an attention that does not report its logits.
    """
    from megatron.core import parallel_state

    layers = [layer for layer in attention_layers(model) if _wants_logits(layer)]
    if log_max_only:
        layers = [layer for layer in layers if _reports_logits(layer)]
    else:
        for layer in layers:
            _check(layer)
    with torch.no_grad():
        largest = _reduce_over_replicas(layers, log_max_only)
        peaks = torch.stack([torch.zeros((), device=_device(model)), *(logits.max() for logits in largest)])
        largest_of_ranks = peaks.max()
        group = parallel_state.get_model_parallel_group()
        torch.distributed.all_reduce(largest_of_ranks, op=torch.distributed.ReduceOp.MAX, group=group)
        peaks[0] = largest_of_ranks
        peak_of_all_ranks, *peaks_of_layers = peaks.tolist()
        for layer, logits, peak in zip(layers, largest, peaks_of_layers, strict=True):
            setattr(layer.core_attention, _LARGEST, None)
            if not log_max_only and layer.config.qk_clip and layer.config.qk_clip_threshold < peak < math.inf:
                _scale_weights(layer, logits)
    return float(peak_of_all_ranks)


def attention_layers(model: list[torch.nn.Module]) -> Iterator[Any]:
    """Every layer of these chunks that has an inner attention."""
    for chunk in model:
        yield from (module for module in chunk.modules() if hasattr(module, "core_attention"))


def _wants_logits(layer: Any) -> bool:
    """True if its own configuration asks for its logits; that of an encoder in a multimodal model may not."""
    config = getattr(layer, "config", None)
    return any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit"))


def _reports_logits(layer: Any) -> bool:
    if hasattr(layer.core_attention, _LARGEST):
        return True
    if not getattr(layer, "_says_that_it_reports_no_logits", False):
        layer._says_that_it_reports_no_logits = True
        logger.warning(_REPORTS_NOTHING, type(layer.core_attention).__name__, layer.layer_number)
    return False


def _check(layer: Any) -> None:
    """Raise ValueError, in the first step already, if a clip of this layer could not work."""
    if getattr(layer, "_can_be_clipped", False):
        return
    if not hasattr(layer.core_attention, _LARGEST):
        raise ValueError(f"--qk-clip: {_REPORTS_NOTHING % (type(layer.core_attention).__name__, layer.layer_number)}")
    check_graphs(layer.config)
    heads = _heads(layer) * (layer.pg_collection.tp.size() if shares_group_between_ranks(layer) else 1)
    rows = {name: factors.numel() for name, factors in row_factors(layer, torch.zeros(heads)).items()}
    check_weights(layer, {name: _weight(layer, name) for name in rows}, rows)
    layer._can_be_clipped = True


def _heads(layer: Any) -> int:
    """The heads of this tensor-parallel rank."""
    return int(layer.config.num_attention_heads // layer.config.tensor_model_parallel_size)


def _weight(layer: Any, name: str) -> torch.nn.Parameter:
    weight = getattr(getattr(layer, name), "weight", None)
    if weight is None:
        raise ValueError(
            f"--qk-clip: {name} of layer {layer.layer_number} is a {type(getattr(layer, name)).__name__} without a "
            "weight of its own, as adapters are; leave --qk-clip out"
        )
    return weight


def _reduce_over_replicas(layers: list[Any], log_max_only: bool) -> list[torch.Tensor]:
    """For each layer the largest logits, fp32 [heads], of all microbatches on all replicas; -inf where none ran.

    The heads are those of this rank, or of all tensor-parallel ranks where they share query groups. For the log alone
    it is one number, [1]. Replicas have the same layers, but each may have run others: some may have no images.
    """
    from megatron.core import parallel_state

    if not layers:
        return []
    device = _device(layers)
    measured = [_largest_logits(layer, device, log_max_only) for layer in layers]
    together = torch.cat(measured)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX, group=group)
    parts = together.split([logits.numel() for logits in measured])
    if log_max_only:
        return list(parts)
    return [_gather_shared_groups(layer, logits) for layer, logits in zip(layers, parts, strict=True)]


def _largest_logits(layer: Any, device: torch.device, log_max_only: bool) -> torch.Tensor:
    logits, heads = getattr(layer.core_attention, _LARGEST), 1 if log_max_only else _heads(layer)
    if logits is None:
        return torch.full((heads,), -math.inf, device=device)
    if log_max_only:
        return logits.detach().float().max().view(1)
    if logits.shape != (heads,):
        raise ValueError(
            f"--qk-clip: the attention of layer {layer.layer_number} reports the largest logits of "
            f"{list(logits.shape)} heads, but this rank has {heads}; leave --qk-clip out"
        )
    return logits.detach().float()


def _device(modules: list[Any]) -> torch.device:
    return next(param.device for module in modules for param in module.parameters())


def _gather_shared_groups(layer: Any, logits: torch.Tensor) -> torch.Tensor:
    """The logits of all heads, where tensor-parallel ranks share query groups; else those of this rank."""
    if not shares_group_between_ranks(layer):
        return logits
    parts = [torch.empty_like(logits) for _ in range(layer.pg_collection.tp.size())]
    torch.distributed.all_gather(parts, logits, group=layer.pg_collection.tp)
    return torch.cat(parts)


def _scale_weights(layer: Any, logits: torch.Tensor) -> None:
    for name, factors in row_factors(layer, logits).items():
        for param in (_weight(layer, name), getattr(getattr(layer, name), "bias", None)):
            if param is not None and param.numel():
                scale_rows(param, factors)


def refuse_at_start(call: Call) -> Any:
    """Wraps validate_args(args, defaults)."""
    check_run(call["args"])
    return call.proceed()


def keep_logits_of_training(call: Call) -> Any:
    """Wraps TEDotProductAttention.forward, which keeps the largest logits of all its calls since the last step.

    Those of validation are not the step's. Up to 0.18 they also keep the graph of their microbatch alive
    (NVIDIA/Megatron-LM#5067).
    """
    attention = call.instance
    before = getattr(attention, _LARGEST, None)
    output = call.proceed()
    now = getattr(attention, _LARGEST, None)
    if now is not None:
        setattr(attention, _LARGEST, now.detach() if attention.training else before)
    return output


def clip_after_update(call: Call) -> float:
    """Wraps clip_qk: train_step calls it after skipped updates too, where it would rescale the weights."""
    if last_step_state().decision.skips_update:
        call["log_max_only"] = True
    return call.proceed()


def remember_optimizer(call: Call) -> None:
    """Wraps MixedPrecisionOptimizer.__init__, with which that of a DistributedOptimizer begins."""
    call.proceed()
    remember(call.instance)
