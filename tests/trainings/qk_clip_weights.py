"""The weights of queries and keys: whole, as the model and as its optimizer have them, and scaled by the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_overrides.norms.optimizer_tree import leaves
from tests.trainings.qk_clip import ALPHA, HEADS


def scaled_params(layer: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name of a linear layer, its weight), and the same of its bias, if it has one."""
    latent = ["linear_kv_up_proj", "linear_q_proj", "linear_q_up_proj"]
    for name in ["linear_qkv"] if hasattr(layer, "linear_qkv") else latent:
        linear = getattr(layer, name, None)
        if linear is not None:
            yield name, linear.weight
            if getattr(linear, "bias", None) is not None and linear.bias.numel():
                yield name, linear.bias


def scale_by_rule(
    config: Any, name: str, weight: torch.Tensor, largest: Sequence[float], threshold: float
) -> torch.Tensor:
    """`weight`, whole, in float64, with the rows of queries and keys scaled head by head, or group by group."""
    weight = weight.double().clone()
    etas = [min(1.0, threshold / float(logit)) if logit > 0 else 1.0 for logit in largest]
    if name == "linear_qkv":
        groups, size = config.num_query_groups, config.kv_channels
        heads = HEADS // groups
        gate = heads if getattr(config, "attention_output_gate", False) else 0
        rows = size * (heads + gate + 2)
        for group in range(groups):
            eta = min(etas[group * heads : (group + 1) * heads])
            first = group * rows
            weight[first : first + heads * size] *= eta**ALPHA
            key = first + (heads + gate) * size
            weight[key : key + size] *= eta ** (1 - ALPHA)
        return weight
    rows = len(weight) // HEADS
    for head, eta in enumerate(etas):
        own = weight[head * rows : (head + 1) * rows]
        if name == "linear_kv_up_proj":
            own[: config.qk_head_dim] *= eta ** (1 - ALPHA)
        else:
            own[: config.qk_head_dim] *= eta**ALPHA
            own[config.qk_head_dim :] *= eta
    return weight


def whole(optimizer: Any, param: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as the model has it, and in fp32 as its optimizer has it, both joined over all ranks."""
    flat = torch.zeros(param.numel(), dtype=torch.float32)
    ranks_that_have_it = torch.zeros(param.numel(), dtype=torch.float32)
    main, place = _main_weight(optimizer, param)
    if main is not None:
        flat[place] = main
        ranks_that_have_it[place] = 1.0
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(flat, group=group)
    torch.distributed.all_reduce(ranks_that_have_it, group=group)
    return gather(param.detach()), gather((flat / ranks_that_have_it).view(param.shape))


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all tensor-parallel ranks, joined."""
    parts = [torch.empty_like(tensor) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts)


def _main_weight(optimizer: Any, param: torch.nn.Parameter) -> tuple[torch.Tensor | None, slice]:
    """What this rank's optimizer keeps of a parameter in fp32, flat, and its place there; the model's own in fp32."""
    everywhere = slice(None)
    for leaf in leaves(optimizer):
        if param in getattr(leaf, "model_param_group_index_map", {}):
            place = leaf._get_model_param_range_map(param)["param"]
            return _main_shard(leaf, param, slice(place.start, place.end)), slice(place.start, place.end)
        for model_groups, main_groups in (
            ("float16_groups", "fp32_from_float16_groups"),
            ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
        ):
            for params, mains in zip(getattr(leaf, model_groups, ()), getattr(leaf, main_groups, ()), strict=True):
                for one, main in zip(params, mains, strict=True):
                    if one is param:
                        return main.detach().flatten(), everywhere
    if param.dtype == torch.float32 and not any(hasattr(leaf, "float16_groups") for leaf in leaves(optimizer)):
        return param.detach().flatten(), everywhere
    return None, slice(0, 0)  # another rank has it


def _main_shard(leaf: Any, param: torch.nn.Parameter, place: slice) -> torch.Tensor:
    group, order = leaf.model_param_group_index_map[param]
    shard = leaf.optimizer.param_groups[group]["params"][order]
    inner = getattr(leaf.optimizer, "param_to_inner_param", {}).get(shard)
    if inner is not None:
        return inner.detach().flatten()
    if not leaf.config.use_precision_aware_optimizer:
        return shard.detach().flatten()
    main = leaf.optimizer.get_unscaled_state(shard, "master_param")
    if main.dtype == torch.int16:
        bits = (param.data.view(-1)[place].view(torch.int16).int() << 16) + main.int()
        main = bits.view(torch.float32)
    return main.flatten()
