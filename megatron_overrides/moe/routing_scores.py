"""Scores of experts in fp32 (NVIDIA/Megatron-LM#3673, #2765).

Before 0.18 a router whose logits have 16 bits rounds the scores to these before it chooses, so experts with almost the
same score are chosen by their index.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def choose_by_scores_in_fp32(call: Call) -> tuple[Any, Any]:
    """Wraps topk_routing_with_score_function: (probabilities in the dtype of the logits, map or indices)."""
    logits = call["logits"]
    if not call["fused"]:  # TransformerEngine's kernel computes in fp32
        call["logits"] = logits.float()
    probs, chosen = call.proceed()
    return probs.type_as(logits), chosen


def score_in_fp32(call: Call) -> tuple[Any, Any]:
    """Wraps compute_routing_scores_for_aux_loss: (map, scores in fp32)."""
    if not call["fused"]:
        call["logits"] = call["logits"].float()
    return call.proceed()
