"""The wrapper that scatters the embedding of an MTP layer over the sequence where Megatron leaves it whole.

NVIDIA/Megatron-LM#6256: multimodal models turn the scatter of their embedding off, because they put images and audio
into the whole sequence first; an MTP layer calls that embedding itself.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def scatter_embeddings(call: Call) -> tuple[Any, ...]:
    """Wraps MultiTokenPredictionLayer._get_embeddings, which returns (..., embedded tokens, hidden states)."""
    *rest, embedded, hidden_states = call.proceed()
    embedding = call["embedding"]
    if call.instance.config.sequence_parallel and not getattr(embedding, "scatter_to_sequence_parallel", True):
        # A layer of 0.16 has no group, and None means Megatron's own.
        from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

        embedded = scatter_to_sequence_parallel_region(embedded, group=getattr(call.instance, "tp_group", None))
    return (*rest, embedded, hidden_states)
