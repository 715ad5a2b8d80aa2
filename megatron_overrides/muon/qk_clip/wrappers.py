"""What is called in place of, and around, Megatron's functions for QK clipping.

Megatron's clip_qk visits `decoder.layers` of a model in two wrappers; here every attention layer below a model chunk is
visited, in MTP heads and hybrid models, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_overrides.call import Call
from megatron_overrides.muon.qk_clip.rule import row_factors, shares_group_between_ranks
from megatron_overrides.muon.qk_clip.weights import remember_shards, scale_rows

_LARGEST = "current_max_attn_logits"


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
    layers = [layer for layer in attention_layers(model) if _has_run(layer)]
    with torch.no_grad():
        largest = _largest_of_each_head(layers)
        peaks = torch.stack([torch.zeros((), device=_device(model)), *(logits.max() for logits in largest)])
        of_all_ranks = peaks.max()
        group = parallel_state.get_model_parallel_group()
        torch.distributed.all_reduce(of_all_ranks, op=torch.distributed.ReduceOp.MAX, group=group)
        peaks[0] = of_all_ranks
        peak_of_all_ranks, *peaks_of_layers = peaks.tolist()
        for layer, logits, peak in zip(layers, largest, peaks_of_layers, strict=True):
            setattr(layer.core_attention, _LARGEST, None)
            if layer.config.qk_clip_threshold < peak < math.inf and not log_max_only:
                _scale_weights(layer, logits)
    return float(peak_of_all_ranks)


def attention_layers(model: list[torch.nn.Module]) -> Iterator[Any]:
    """Every layer of these chunks that has an inner attention, once."""
    seen = set()
    for chunk in model:
        for module in chunk.modules():
            if hasattr(module, "core_attention") and id(module) not in seen:
                seen.add(id(module))
                yield module


def _has_run(layer: Any) -> bool:
    if not (layer.config.qk_clip or layer.config.log_max_attention_logit):
        return False  # an encoder of a multimodal model, say, whose configuration does not ask for it
    if not hasattr(layer.core_attention, _LARGEST):
        raise ValueError(
            f"--qk-clip and --log-max-attention-logit: {type(layer.core_attention).__name__} of layer "
            f"{layer.layer_number} does not report its largest logits; they need TransformerEngine's attention "
            "(--transformer-impl transformer_engine)"
        )
    return getattr(layer.core_attention, _LARGEST) is not None


def _largest_of_each_head(layers: list[Any]) -> list[torch.Tensor]:
    """For each layer the largest logits, fp32 [heads], of all microbatches on all replicas.

    The heads are those of this rank, or of all tensor-parallel ranks where they share query groups.
    """
    if not layers:
        return []
    measured = [getattr(layer.core_attention, _LARGEST).detach().float() for layer in layers]
    for layer, logits in zip(layers, measured, strict=True):
        heads = layer.config.num_attention_heads // layer.config.tensor_model_parallel_size
        if logits.shape != (heads,):
            raise ValueError(
                f"--qk-clip and --log-max-attention-logit: the attention of layer {layer.layer_number} reports the "
                f"largest logits of {list(logits.shape)} heads, but this rank has {heads}: context-parallel ranks "
                "divide them; choose --cp-comm-type p2p"
            )
    together = torch.cat(measured)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX, group=group)
    parts = together.split([logits.numel() for logits in measured])
    return [_of_shared_groups(layer, logits) for layer, logits in zip(layers, parts, strict=True)]


def _device(model: list[torch.nn.Module]) -> torch.device:
    return next(param.device for chunk in model for param in chunk.parameters())


def _of_shared_groups(layer: Any, logits: torch.Tensor) -> torch.Tensor:
    """The logits of all heads, where tensor-parallel ranks share query groups; else those of this rank."""
    if not shares_group_between_ranks(layer):
        return logits
    parts = [torch.empty_like(logits) for _ in range(layer.pg_collection.tp.size())]
    torch.distributed.all_gather(parts, logits, group=layer.pg_collection.tp)
    return torch.cat(parts)


def _scale_weights(layer: Any, logits: torch.Tensor) -> None:
    for name, factors in row_factors(layer, logits).items():
        linear = getattr(layer, name)
        for param in (linear.weight, getattr(linear, "bias", None)):
            if param is not None and param.numel():
                scale_rows(param, factors)


def keep_logits_of_training(call: Call) -> Any:
    """Wraps TEDotProductAttention.forward, which keeps the largest logits of all its calls since the last step.

    Those of validation are not the step's. Up to 0.18 they keep the graph of their microbatch alive, too
    (NVIDIA/Megatron-LM#5067).
    """
    attention = call.instance
    before = getattr(attention, _LARGEST, None)
    output = call.proceed()
    now = getattr(attention, _LARGEST, None)
    if now is not None:
        setattr(attention, _LARGEST, now.detach() if attention.training else before)
    return output


def remember_place_of_shards(call: Call) -> None:
    """Wraps DistributedOptimizer.__init__."""
    call.proceed()
    remember_shards(call.instance)
