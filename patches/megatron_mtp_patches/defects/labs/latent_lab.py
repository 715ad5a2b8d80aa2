"""Code that reproductions with multi-latent attention (MLA) share."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from .lab import LENGTH, make_generator, norm, start, sum_over_ranks


def norms_of_down_projection(is_split: bool, **settings: Any) -> tuple[float, float]:
    """The norm of the gradient of MLA's down projection for keys and values on one rank, and with heads on two.

    Args:
        is_split: each of the two ranks has half of the down projection.
        settings: further ones of MLATransformerConfig where the heads are on two ranks.
    """
    from megatron.core import parallel_state

    start()
    expected = norm(_gradient_of_down_projection(is_split))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    local_norm = norm(_gradient_of_down_projection(is_split, tensor_model_parallel_size=2, **settings))
    return expected, sum_over_ranks(local_norm**2) ** 0.5 if is_split else local_norm


def make_attention(is_split: bool = False, **settings: Any) -> Any:
    """A layer of MLA without a projection of queries; each tensor-parallel rank has its part of the same weights.

    Args:
        is_split: the down projection of keys and values is split over these ranks; else each has a copy.
        settings: of MLATransformerConfig.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "q_lora_rank": None}
    sizes |= {"kv_lora_rank": 12, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4, "rope_type": "rope"}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True, "add_bias_linear": False}
    config = MLATransformerConfig(**sizes, gradient_accumulation_fusion=False, **settings)
    spec = specs.get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True).submodules.self_attention
    if is_split:
        spec.submodules.linear_kv_down_proj = TEColumnParallelLinear
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    rank, ranks = groups.tp.rank(), groups.tp.size()
    for name, param in layer.named_parameters():
        is_copy = name == "linear_kv_down_proj.weight" and not is_split  # 0.16 marks it as split
        _fill(name, param, rank, 1 if is_copy else ranks)
    return layer.to(torch.get_default_device())  # TransformerEngine's layers are initialized on the CPU


def _gradient_of_down_projection(is_split: bool, **settings: Any) -> Any:
    layer = make_attention(is_split, **settings)
    config, tp_group = layer.config, layer.pg_collection.tp
    generator = make_generator(3)
    states, weights = (torch.randn(LENGTH, 1, config.hidden_size, generator=generator) for _ in range(2))
    if config.sequence_parallel:
        states, weights = (whole.chunk(tp_group.size())[tp_group.rank()] for whole in (states, weights))
    (layer(states, None)[0] * weights).sum().backward()
    return layer.linear_kv_down_proj.weight.grad


def _fill(name: str, param: Any, rank: int, ranks: int) -> None:
    """Give a parameter this rank's part of a tensor that its name determines."""
    shape, is_part = list(param.shape), ranks > 1 and getattr(param, "tensor_model_parallel", False)
    if is_part:
        shape[param.partition_dim] *= ranks
    whole = torch.randn(shape, generator=make_generator(zlib.crc32(name.encode()))) / 4
    with torch.no_grad():
        param.copy_(whole.chunk(ranks, param.partition_dim)[rank] if is_part else whole)
