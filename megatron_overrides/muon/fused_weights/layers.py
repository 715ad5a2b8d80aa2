"""The weights of a model that hold several matrices, by layer, and the place of each matrix in them.

A layer is known by its attributes, so the layers of MTP heads, hybrid models and experts are found as those of the main
model are. The sizes are those of this tensor-parallel rank. Megatron gives each rank the rows of its own heads, and a
part of each of the others: of gate and up, and of q, k, v, z, b and a.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron_overrides.muon.fused_weights.rows import FusedRows, halves


class FusedWeight(NamedTuple):
    """A weight, its name in its layer, and where its matrices lie."""

    name: str
    weight: torch.nn.Parameter
    rows: FusedRows


class CannotSplitError(ValueError):
    """A layer whose matrices cannot be told apart; the message says which and what to change."""


def glu_weights(layer: Any) -> Iterator[FusedWeight]:
    """Yield `linear_fc1` of a gated MLP: [gate; up], or both in blocks where the layer interleaves them.

    A grouped linear layer has a weight for each expert (weight0, weight1, ...). A weight with three dimensions, as that
    of --moe-single-grouped-weight, is not Muon's.
    """
    config = getattr(layer, "config", None)
    if not getattr(config, "gated_linear_unit", False):
        return
    if type(layer).__name__ == "GroupedMLP":  # 0.16: one matrix of all experts, [hidden, experts * 2 * ffn]
        raise CannotSplitError(
            "the experts of --moe-use-legacy-grouped-gemm lie side by side in one matrix: use --moe-grouped-gemm "
            "without it"
        )
    for name, weight in _weights(layer, "linear_fc1"):
        block = None
        if name != "weight":
            block = getattr(config, "moe_mlp_glu_interleave_size", None)
        elif hasattr(layer, "_fused_grouped_swiglu_ops"):  # 0.19: FusedSharedExpertMLP
            block = getattr(config, "moe_shared_expert_glu_interleave_size", None)
        yield FusedWeight(f"linear_fc1.{name}", weight, halves(weight.size(0), block))


def attention_weights(layer: Any) -> Iterator[FusedWeight]:
    """Yield the projections that hold heads, also of multi-latent attention.

    Each head of the query, of the gate, and the key and the value of each query group have `kv_channels` rows in
    `linear_qkv`. As NVIDIA/Megatron-LM#6326 has it, a query head of multi-latent attention is two matrices, without and
    with position; a head of `linear_kv_up_proj` is its key and its value. With fewer query groups than ranks, a group
    lies on several ranks, but each head may still be whole on one of them.
    """
    config: Any = getattr(layer, "config", None)
    for name, weight in _weights(layer, "linear_qkv"):
        yield FusedWeight(f"linear_qkv.{name}", weight, FusedRows((config.kv_channels,), is_each_group_alone=True))
    if not getattr(config, "multi_latent_attention", False):
        return
    query, key = (config.qk_head_dim, config.qk_pos_emb_head_dim), config.qk_head_dim
    sizes = {
        "linear_q_proj": query,
        "linear_q_up_proj": query,
        "linear_kv_up_proj": (key, config.v_head_dim),
        "linear_k_up_proj": (key,),  # absorbed, up to 0.18
        "linear_v_up_proj": (config.v_head_dim,),
    }
    for linear, head_rows in sizes.items():
        for name, weight in _weights(layer, linear):
            yield FusedWeight(f"{linear}.{name}", weight, FusedRows(head_rows, is_each_group_alone=True))


def gdn_weights(layer: Any) -> Iterator[FusedWeight]:
    """Yield `in_proj` of GatedDeltaNet: q, k, v, z, b and a, each over all heads."""
    if not all(hasattr(layer, name) for name in ("in_proj", "qk_dim", "v_dim", "num_value_heads", "tp_size")):
        return
    sizes = getattr(layer, "in_proj_split_sections", None)  # from 0.19 on, with those of its variants
    if sizes is None:
        whole_sizes = (*[layer.qk_dim] * 2, *[layer.v_dim] * 2, *[layer.num_value_heads] * 2)
        sizes = [size // layer.tp_size for size in whole_sizes]
    for name, weight in _weights(layer, "in_proj"):
        yield FusedWeight(f"in_proj.{name}", weight, FusedRows(tuple(sizes)))


FINDERS = {
    "muon_split_glu": glu_weights,
    "muon_split_qkv_per_head": attention_weights,
    "muon_split_gdn": gdn_weights,
}


def fused_weights(model: torch.nn.Module, setting: str) -> Iterator[FusedWeight]:
    """Yield the weights that `setting` splits, also those that do not train.

    Raises:
        CannotSplitError: there is one whose matrices cannot be cut out on this rank.
    """
    for path, layer in model.named_modules():
        for fused in FINDERS[setting](layer):
            where = f"{path}.{fused.name} {tuple(fused.weight.shape)}"
            if getattr(fused.weight, "is_gtp_weight_remat", False):
                raise CannotSplitError(f"{where} is a slice of rows (generalized tensor parallelism): turn that off")
            if not fused.rows.divide(fused.weight.size(0)):
                raise CannotSplitError(
                    f"the rows of {where} are not whole groups of {fused.rows.sizes}: choose a tensor-parallel size "
                    f"that does not cut through them"
                )
            yield fused


def _weights(layer: Any, linear: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the matrices of a linear layer by their names, not those of adapters inside it."""
    module = getattr(layer, linear, None)
    if isinstance(module, torch.nn.Module):
        for name, weight in module.named_parameters(recurse=False):
            if re.fullmatch(r"weight\d*", name) and weight.ndim == 2:
                yield name, weight
