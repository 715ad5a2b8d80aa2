"""Small trainings with --qk-clip, of several kinds of attention, model, parallelism and optimizer."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_mtp_patches.defects.labs.lab import make_optimizer

from megatron_overrides.muon.qk_clip.clipping import attention_layers
from tests.trainings.hybrid_model import find_hybrid_model
from tests.trainings.muon import why_no_muon

VOCABULARY, LENGTH, HIDDEN, HEADS, ALPHA = 32, 16, 32, 4, 0.3
_LATENT = {
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 6,
    "rope_type": "rope",
    "normalization": "RMSNorm",
}
_ATTENTION = {
    "multi-head": {"add_bias_linear": True},
    "grouped": {"num_query_groups": 2},
    "gated": {"num_query_groups": 2, "attention_output_gate": True},
    "one group": {"num_query_groups": 1},
    "latent": {**_LATENT, "q_lora_rank": 8},
    "latent without query rank": {**_LATENT, "q_lora_rank": None},
}
_HALF = {"bf16": True}
_SPLIT = {"muon_split_glu": True, "muon_split_qkv_per_head": True}
_SHARDED = {**_HALF, "use_distributed_optimizer": True}
_OFFLOADED = {**_SHARDED, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
_OPTIMIZERS = {
    "fp32": {},
    "bf16": _HALF,
    "distributed": _SHARDED,
    "distributed, fp32": {"use_distributed_optimizer": True},
    "precision-aware": {**_SHARDED, "use_precision_aware_optimizer": True, "store_param_remainders": False},
    "remainders": {**_SHARDED, "use_precision_aware_optimizer": True},
    "offloaded": _OFFLOADED,
    "offloaded, precision-aware": {**_OFFLOADED, "use_precision_aware_optimizer": True},
    "muon": {**_HALF, "optimizer": "muon"},
    "layer-wise": {**_HALF, "optimizer": "dist_muon"},
    "layer-wise, split": {**_HALF, "optimizer": "dist_muon", **_SPLIT},
}
LAYOUTS = {
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


class Training(NamedTuple):
    """A training on two ranks.

    Attributes:
        attention: one of _ATTENTION.
        layout: one of LAYOUTS; VPP2 is PP2 with two chunks on each rank.
        optimizer: one of _OPTIMIZERS.
        heads: the number of MTP heads.
        hybrid: the model has a layer of attention or of an MLP alone where another has both.
    """

    attention: str
    layout: str
    optimizer: str
    heads: int = 0
    hybrid: bool = False

    def __str__(self) -> str:
        return ", ".join([*self[:3], *[f"{self.heads} heads"] * bool(self.heads), *["hybrid"] * self.hybrid])


TRAININGS = [
    Training("multi-head", "DP2", "fp32", 1),
    Training("multi-head", "TP2", "bf16"),
    Training("multi-head", "VPP2", "distributed"),
    Training("multi-head", "DP2", "layer-wise", 1),
    Training("multi-head", "DP2", "precision-aware", 0, True),
    Training("multi-head", "PP2", "offloaded", 1),
    Training("grouped", "DP2", "distributed", 1),
    Training("grouped", "TP2", "fp32", 1),
    Training("grouped", "TP2", "remainders", 1),
    Training("grouped", "PP2", "layer-wise"),
    Training("grouped", "VPP2", "precision-aware"),
    Training("grouped", "TP2", "muon", 0, True),
    Training("gated", "DP2", "precision-aware"),
    Training("gated", "TP2", "distributed", 1),
    Training("gated", "PP2", "bf16", 1),
    Training("gated", "PP2", "offloaded", 0, True),
    Training("gated", "TP2", "layer-wise", 0, True),
    Training("one group", "DP2", "remainders", 2),
    Training("one group", "TP2", "bf16", 1),
    Training("one group", "TP2", "distributed, fp32", 0, True),
    Training("one group", "PP2", "offloaded", 1),
    Training("latent", "DP2", "offloaded", 1),
    Training("latent", "TP2", "distributed", 1),
    Training("latent", "TP2", "offloaded, precision-aware"),
    Training("latent", "PP2", "muon", 1),
    Training("latent", "VPP2", "bf16"),
    Training("latent", "DP2", "layer-wise"),
    Training("latent without query rank", "DP2", "distributed, fp32", 2),
    Training("latent without query rank", "TP2", "precision-aware", 1),
    Training("latent without query rank", "PP2", "fp32", 0, True),
]


def why_not(training: Training) -> str:
    """Why this Megatron cannot run the training with the packages that are installed; '' if it can."""
    if training.hybrid and "latent" in training.attention and not _has_latent_hybrid():
        return "hybrid models have layers of latent attention from 0.19 on"
    return why_no_muon(_OPTIMIZERS[training.optimizer].get("optimizer", ""))


def _has_latent_hybrid() -> bool:
    try:
        allocation = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_allocation")
    except ModuleNotFoundError:
        return False
    return hasattr(allocation.Symbols, "MLA")


def build(training: Training) -> tuple[list[Any], Any]:
    """The chunks of a model, in DDP, that has taken a step, and its optimizer. Megatron's groups have to be those."""
    MTPLossLoggingHelper.tracker.clear()
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    settings = {"optimizer": "adam", "lr": 1e-3, **_OPTIMIZERS[training.optimizer]}
    chunks = [_wrap(chunk, settings) for chunk in _make_chunks(training, "bf16" in settings)]
    optimizer = make_optimizer(*chunks, **settings)
    run(chunks, forward_only=False)
    for chunk in chunks:
        chunk.finish_grad_sync()
    optimizer.step()
    return chunks, optimizer


def run(chunks: list[Any], forward_only: bool = True) -> float | None:
    """Two microbatches, others on each data-parallel rank; their mean loss, on the last pipeline stage."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    batches = [torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator) for _ in range(2)]
    positions = torch.arange(LENGTH).unsqueeze(0)

    def step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(iterator)
        labels = tokens[:, 1:].contiguous()
        loss = model(tokens[:, :-1].contiguous(), positions, None, labels=labels)
        return loss, lambda output: (output.float().mean(), {"loss": float(output.detach().float().mean())})

    reported = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return sum(one["loss"] for one in reported) / len(reported) if reported else None


def train(
    chunks: list[Any], optimizer: Any, steps: int, rate: float, clip: Any, before_step: Any = lambda: None
) -> tuple[float, list[float]]:
    """Steps with this learning rate, before each of which `before_step` is called; then `clip` gets the chunks.

    Returns:
        the loss of the last step, and the largest logit of each layer in it.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = run(chunks, forward_only=False)
        for chunk in chunks:
            chunk.finish_grad_sync()
        layers = list(attention_layers(chunks))
        logits = [float(layer.core_attention.current_max_attn_logits.max()) for layer in layers]
        before_step()
        optimizer.step()
        clip(chunks)
        for layer in layers:
            layer.core_attention.current_max_attn_logits = None
    return loss, logits


def _wrap(chunk: torch.nn.Module, settings: dict[str, Any]) -> Any:
    config = chunk.config
    distributed = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.get("use_distributed_optimizer", False)
    )
    return DistributedDataParallel(config, distributed, Float16Module(config, chunk) if "bf16" in settings else chunk)


def _make_chunks(training: Training, is_half: bool) -> list[torch.nn.Module]:
    sizes = LAYOUTS[training.layout]
    is_latent = "latent" in training.attention
    stages = sizes.get("virtual_pipeline_model_parallel_size", 1)
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=4 if training.hybrid or stages > 1 else 2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.5,
        qk_clip=True,
        qk_clip_alpha=ALPHA,
        mtp_num_layers=training.heads or None,
        gradient_accumulation_fusion=False,
        gated_linear_unit="split" in training.optimizer,
        deallocate_pipeline_outputs=True,
        **sizes,
        **({"pipeline_dtype": torch.bfloat16 if is_half else torch.float32} if "PP" in training.layout else {}),
        **({"bf16": True, "params_dtype": torch.bfloat16} if is_half else {}),
        **{"add_bias_linear": False, **_ATTENTION[training.attention]},
    )
    if training.hybrid:
        return [_make_hybrid(config)]
    spec = specs.get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=is_latent)
    chunks = []
    for stage in range(stages):
        vp_stage = stage if stages > 1 else None
        heads = specs.get_gpt_mtp_block_spec(config, spec, True, vp_stage=vp_stage) if training.heads else None
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=True) and stage == 0,
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=True) and stage == stages - 1,
        }
        places = {"position_embedding_type": "rope", "mtp_block_spec": heads, "vp_stage": vp_stage}
        chunks.append(GPTModel(config, spec, VOCABULARY, LENGTH, **ends, **places))
    return chunks


def _make_hybrid(config: Any) -> torch.nn.Module:
    model, spec = find_hybrid_model()
    is_new = "hybrid_layer_pattern" in inspect.signature(model.__init__).parameters
    is_cut = config.pipeline_model_parallel_size > 1
    attention = "+" if isinstance(config, MLATransformerConfig) else "*"
    layers = f"{attention}-|{attention}-" if is_cut and is_new else f"{attention}-{attention}-"
    embedding = "none" if attention == "+" else "rope"  # latent attention rotates its own part of queries and keys
    pattern = {"hybrid_layer_pattern" if is_new else "hybrid_override_pattern": layers}
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    places = {"position_embedding_type": embedding, **pattern, **ends}
    built: torch.nn.Module = model(config, spec, VOCABULARY, LENGTH, **places)
    return built
