"""What Muon does to the weights of small models, and the same in float64 for matrices that are cut out by hand."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import package_info
from megatron_mtp_patches.defects.labs.lab import make_optimizer

HIDDEN, FFN, CHANNELS, HEADS, GROUPS, EXPERTS = 16, 24, 4, 4, 2, 2
QUERY, POSITION, VALUE = 6, 4, 5  # of a head of multi-latent attention
GDN = {"linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LR = 0.5
SHARDED = "muon with the distributed optimizer"
SPLITS = ("muon_split_glu", "muon_split_qkv_per_head", "muon_split_gdn")
# Which settings have something to split in the models of make_model.
HAS = {
    "dense": SPLITS[:2],
    "gated attention": SPLITS[:2],
    "multi-latent attention": SPLITS[:2],
    "direct query": SPLITS[:2],
    "grouped experts": SPLITS[:2],
    "single experts": SPLITS[:2],
    "GatedDeltaNet": SPLITS[2:],
}


def why_no_muon(optimizer: str = "muon") -> str:
    """Why this Megatron cannot make Muon, if `optimizer` is one, with the packages that are installed; '' if it can."""
    if "muon" not in optimizer:
        return ""
    try:
        installed = metadata.version("emerging-optimizers")
    except metadata.PackageNotFoundError:
        return "Muon needs emerging-optimizers"
    if package_info.__version__.startswith("0.16.") and not installed.startswith("0.1."):
        return f"Muon of megatron-core 0.16 needs emerging-optimizers 0.1, which PyPI lacks; here is {installed}"
    return ""


needs_muon = pytest.mark.skipif(bool(why_no_muon()), reason=why_no_muon())


def make_model(kind: str, tensor: int = 1, **settings: Any) -> Any:
    """A GPT with an MTP head and gated MLPs, or a layer of GatedDeltaNet; its weights are those of `kind`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    model_parallel_cuda_manual_seed(1)
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS}
    common = {
        **sizes,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": tensor,
        "mtp_num_layers": 1,
    }
    if kind == "GatedDeltaNet":
        return _make_gdn(TransformerConfig(**{**common, "mtp_num_layers": None, **settings}, **_gdn_settings()))
    has_experts, latent = "experts" in kind, kind in ("multi-latent attention", "direct query")
    if has_experts:
        common |= {
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": FFN,
            "moe_grouped_gemm": kind.startswith("grouped"),
        }
        common |= {"moe_shared_expert_intermediate_size": FFN, "sequence_parallel": tensor > 1}
    if latent:
        rank = {"q_lora_rank": 12 if kind == "multi-latent attention" else None, "kv_lora_rank": 8}
        heads = {"qk_head_dim": QUERY, "qk_pos_emb_head_dim": POSITION, "v_head_dim": VALUE}
        config = MLATransformerConfig(**{**common, **rank, **heads, "rope_type": "rope", **settings})
    else:
        common |= {
            "num_query_groups": GROUPS,
            "kv_channels": CHANNELS,
            "attention_output_gate": kind.startswith("gated"),
        }
        config = TransformerConfig(**{**common, **settings})
    if has_experts or latent:
        spec = get_gpt_layer_with_transformer_engine_spec(
            config.num_moe_experts, config.moe_grouped_gemm, multi_latent_attention=latent
        )
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    heads_spec = get_gpt_mtp_block_spec(config, spec, has_experts or latent)
    return GPTModel(config, spec, 32, 8, position_embedding_type="rope", mtp_block_spec=heads_spec)


def _gdn_settings() -> dict[str, Any]:
    asked = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 1}
    return {"linear_conv_kernel_dim": 2, "deterministic_mode": True, **asked, **GDN}


def _make_gdn(config: Any) -> torch.nn.Module:
    import importlib

    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.spec_utils import build_module

    for ancestor in GatedDeltaNet.__mro__:
        names = vars(importlib.import_module(ancestor.__module__))
        if "HAVE_FLA" in names:  # nothing is computed here
            names["HAVE_FLA"] = True
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = torch.nn.Module()
    model.config = config
    model.attention = build_module(
        get_gated_delta_net_module_spec(config), config=config, layer_number=1, pg_collection=groups
    )
    return model


def make_muon(net: Any, name: str = "muon", bf16: bool = False, **settings: Any) -> tuple[Any, Any]:
    """(optimizer, model in DDP): Muon of a model whose weights are all zero, in float32 or bf16.

    Args:
        name: of the optimizer, or SHARDED: muon with the distributed optimizer, which only 0.18 and later have.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    net = net.bfloat16() if bf16 else net
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    settings = {"lr": LR, "clip_grad": 0.0, "weight_decay": 0.0, "bf16": bf16, **settings}
    settings = {"muon_fp32_matmul_prec": "highest", "muon_tp_mode": "blockwise", **settings}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=name == SHARDED)
    if name == SHARDED:
        from megatron.training.training import wrap_model_chunks_with_ddp

        chunks = wrap_model_chunks_with_ddp([net], net.config, ddp, use_layer_wise_distributed_optimizer=True)
        settings |= {"use_distributed_optimizer": True, "use_layer_wise_distributed_optimizer": True}
        config = OptimizerConfig(optimizer="muon", **settings)
        return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False), chunks[0]
    model = DistributedDataParallel(net.config, ddp, net)
    return make_optimizer(model, optimizer=name, **settings), model


def weights_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """The matrices that Muon trains, by their names."""
    return {
        re.sub(r"^(module\.)+", "", name): param
        for name, param in model.named_parameters()
        if param.ndim == 2 and not getattr(param, "is_embedding_or_output_parameter", False)
    }


def give_gradients(model: Any, seed: int = 3) -> dict[str, torch.Tensor]:
    """Give all parameters random gradients, as after their reduction; return those of the matrices.

    Shards differ from rank to rank, replicas do not.
    """
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        is_shard = getattr(param, "partition_dim", -1) >= 0
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        drawn = torch.randn(ranks, *param.shape, generator=generator)
        param.main_grad.copy_(drawn[parallel_state.get_tensor_model_parallel_rank() if is_shard else 0])
    return {name: weight.main_grad.clone() for name, weight in weights_of(model).items()}


def updates(optimizer: Any, model: Any) -> dict[str, torch.Tensor]:
    """Make a step; return what it has taken from the weights, which were zero, divided by the learning rate."""
    before = {name: weight.detach().double() for name, weight in weights_of(model).items()}
    assert optimizer.step()[0]
    return {name: (before[name] - weight.detach().double()) / LR for name, weight in weights_of(model).items()}


def by_hand(
    name: str, weight: torch.nn.Parameter, gradient: torch.Tensor, splits: tuple[str, ...], tp_mode: str = "blockwise"
) -> torch.Tensor:
    """Muon's update of a weight [rows, columns] in float64, put together from those of its matrices.

    What is sharded is gathered over the tensor-parallel ranks, but for a head, which is on one rank.
    """
    update = torch.zeros_like(gradient, dtype=torch.float64)
    for rows, is_head in _matrices(name, weight, splits):
        piece = gradient[rows].double()
        dim = -1 if is_head or tp_mode == "blockwise" else getattr(weight, "partition_dim", -1)
        update[rows] = _local(_muon(_whole(piece, dim)), dim)
    return update


def _matrices(name: str, weight: torch.Tensor, splits: tuple[str, ...]) -> list[tuple[list[int], bool]]:
    """The rows of each matrix of a weight, and whether it is a head."""
    rows = list(range(weight.size(0)))
    if "linear_fc1.weight" in name and "muon_split_glu" in splits:
        half = len(rows) // 2
        return [(rows[:half], False), (rows[half:], False)]
    if "attention.in_proj.weight" in name and "muon_split_gdn" in splits:
        key = GDN["linear_key_head_dim"] * GDN["linear_num_key_heads"]
        value = GDN["linear_value_head_dim"] * GDN["linear_num_value_heads"]
        sizes = [key, key, value, value, GDN["linear_num_value_heads"], GDN["linear_num_value_heads"]]
        ranks = sum(sizes) // len(rows)
        return [(rows[start:stop], False) for start, stop in _bounds([size // ranks for size in sizes])]
    rows_of_head: list[int] = []
    if "linear_qkv.weight" in name:
        rows_of_head = [CHANNELS]
        if "muon_split_qkv_per_head" not in splits:  # as Megatron does it
            return _three_projections(rows)
    elif re.search(r"linear_q(_up)?_proj.weight", name):
        rows_of_head = [QUERY, POSITION]
    elif "linear_kv_up_proj.weight" in name:
        rows_of_head = [QUERY, VALUE]
    if rows_of_head and "muon_split_qkv_per_head" in splits:
        heads = len(rows) // sum(rows_of_head)
        return [(rows[start:stop], True) for start, stop in _bounds(rows_of_head * heads)]
    return [(rows, False)]


def _three_projections(rows: list[int]) -> list[tuple[list[int], bool]]:
    query = HEADS // GROUPS * CHANNELS
    rows_of_group = query + 2 * CHANNELS
    projections: list[list[int]] = [[], [], []]
    for row in rows:
        place = row % rows_of_group
        projections[0 if place < query else 1 if place < query + CHANNELS else 2].append(row)
    return [(projection, False) for projection in projections]


def _bounds(sizes: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _whole(piece: torch.Tensor, dim: int) -> torch.Tensor:
    group = _group()
    if dim < 0 or group is None:
        return piece
    shards = [torch.empty_like(piece) for _ in range(group.size())]
    dist.all_gather(shards, piece.contiguous(), group=group)
    return torch.cat(shards, dim)


def _local(whole: torch.Tensor, dim: int) -> torch.Tensor:
    group = _group()
    return whole if dim < 0 or group is None else whole.chunk(group.size(), dim)[group.rank()]


def _group() -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None


def _muon(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of Newton-Schulz with the quintic coefficients, times the root of the larger size (spectral)."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    x = matrix / matrix.norm()
    for a, b, c in muon_utils._COEFFICIENT_SETS["quintic"]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x * max(matrix.shape) ** 0.5


def assert_split(net: Any, splits: tuple[str, ...], tolerance: float = 1e-4, **settings: Any) -> None:
    """Assert that a step of Muon with `splits` on updates each weight as by_hand does."""
    optimizer, model = make_muon(net, **dict.fromkeys(splits, True), **settings)
    gradients = give_gradients(model)
    taken = updates(optimizer, model)
    assert len(taken) > 1
    for name, weight in weights_of(model).items():
        right = by_hand(name, weight, gradients[name], splits, settings.get("muon_tp_mode", "blockwise"))
        assert (taken[name] - right).norm() < tolerance * right.norm(), name
