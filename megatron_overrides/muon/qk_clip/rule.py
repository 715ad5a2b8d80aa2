"""By how much QK clipping scales the rows of the weights that make queries and keys.

A head whose largest logit is over the threshold has the factor eta = threshold / largest logit, every other head 1.
Multi-head latent attention scales each head by itself (Kimi K2's report, arXiv 2507.20534): the parts of queries and
keys without rotary embedding by eta^alpha and eta^(1 - alpha), the rotary part of the queries by eta; the rotary part
of the keys is shared by all heads and stays. Where heads share a key, the group has the largest logit of its heads:
queries are scaled by eta^alpha and the key by eta^(1 - alpha), as is each head of cross attention.
"""

from __future__ import annotations

from typing import Any

import torch


def head_factors(largest_logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """eta of each head, fp32, in the shape of `largest_logits`."""
    logits = largest_logits.float()
    return torch.where(logits > threshold, threshold / logits, 1.0)


def row_factors(attention: Any, largest_logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """{linear layer of `attention`: the factor of each of its output rows on this rank, fp32}.

    Args:
        largest_logits: of the heads of this rank, [heads]; of all heads, if tensor-parallel ranks share a group.

    Raises:
        ValueError: it has no weight that makes the keys.
    """
    config = attention.config
    factors = head_factors(largest_logits, config.qk_clip_threshold)
    if hasattr(attention, "linear_qkv"):
        return {"linear_qkv": _group_rows(attention, factors)}
    queries, keys = factors**config.qk_clip_alpha, factors ** (1.0 - config.qk_clip_alpha)
    if hasattr(attention, "linear_kv"):  # cross attention, whose heads have a key and a value each
        size = attention.hidden_size_per_attention_head
        return {"linear_q": _rows((queries, size)), "linear_kv": _rows((keys, size), (torch.ones_like(keys), size))}
    is_absorbed = hasattr(attention, "linear_k_up_proj")  # keys and values have a weight each
    if not is_absorbed and not hasattr(attention, "linear_kv_up_proj"):
        raise ValueError(
            f"--qk-clip: {type(attention).__name__} of layer {attention.layer_number} has no linear_qkv, linear_kv, "
            "linear_kv_up_proj or linear_k_up_proj, so there is no weight of its keys to scale; leave --qk-clip out"
        )
    query_layer = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
    key_rows, value_rows = (keys, config.qk_head_dim), (torch.ones_like(keys), config.v_head_dim)
    if is_absorbed:
        key_factors = {"linear_k_up_proj": _rows(key_rows)}
    else:
        key_factors = {"linear_kv_up_proj": _rows(key_rows, value_rows)}
    return {query_layer: _rows((queries, config.qk_head_dim), (factors, config.qk_pos_emb_head_dim)), **key_factors}


def shares_group_between_ranks(attention: Any) -> bool:
    """True if tensor-parallel ranks have heads of the same query group."""
    groups = attention.config.num_query_groups
    return hasattr(attention, "linear_qkv") and groups < attention.config.tensor_model_parallel_size


def _group_rows(attention: Any, factors: torch.Tensor) -> torch.Tensor:
    """Of a fused weight: in each group the rows of its queries, as many of a gate, if there is one, key and value."""
    config = attention.config
    ranks = config.tensor_model_parallel_size if shares_group_between_ranks(attention) else 1
    groups = config.num_query_groups if ranks > 1 else attention.num_query_groups_per_partition
    group_factors = factors.view(groups, -1).amin(1)
    size, heads = attention.hidden_size_per_attention_head, factors.numel() // groups
    unchanged = torch.ones_like(group_factors)
    gate = [(unchanged, heads * size)] if getattr(config, "attention_output_gate", False) else []
    queries, keys = group_factors**config.qk_clip_alpha, group_factors ** (1.0 - config.qk_clip_alpha)
    rows = _rows((queries, heads * size), *gate, (keys, size), (unchanged, size))
    if ranks > 1:
        rows = rows.chunk(ranks)[attention.pg_collection.tp.rank()]
    return rows


def _rows(*parts: tuple[torch.Tensor, int]) -> torch.Tensor:
    """One factor for each row of heads (or groups) whose rows are in such parts: (factor of each head, how many)."""
    return torch.cat([factors.unsqueeze(1).expand(-1, count) for factors, count in parts], 1).flatten()
