"""A small GPT with MTP heads of the installed Megatron, its process groups, and what its steps take."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig


def start_process_groups(seed: int = 1, **sizes: int) -> None:
    """Start torch.distributed, over nccl where torch has it, and Megatron's groups of these sizes."""
    torch.distributed.init_process_group("nccl" if torch.distributed.is_nccl_available() else "gloo")
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(seed)


def make_config(**settings: Any) -> TransformerConfig:
    """A TransformerConfig of two layers without dropout, unless `settings` say otherwise."""
    defaults = {"num_layers": 2, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(**{**defaults, **settings})


def causal_inputs(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of tokens [b, n + 1] what a GPTModel takes: inputs, positions and causal mask; and the labels, [b, n]."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.size(1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return inputs, torch.arange(length, device=tokens.device).expand_as(inputs), mask, labels


def run_microbatches(model: Any, forward_step: Any, number: int, length: int, batch: int) -> None:
    """Compute the gradients of so many microbatches by Megatron's schedule."""
    sizes = {"num_microbatches": number, "seq_length": length, "micro_batch_size": batch, "forward_only": False}
    get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iter([]), model=[model], **sizes)


def build_gpt(
    config: TransformerConfig,
    vocabulary: int,
    length: int,
    transformer_engine: bool = False,
    tied: bool = True,
    **placement: Any,
) -> GPTModel:
    """This rank's stage of a GPT of Megatron's own layers, or of TransformerEngine's, with the MTP heads of `config`.

    Args:
        tied: the embedding and the output layer share one weight.
        placement: what GPTModel takes of pre_process, post_process, vp_stage etc.; its stage unless they say otherwise.
    """
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, config.moe_grouped_gemm)
    else:
        spec = get_gpt_layer_local_spec(config.num_moe_experts, False, normalization=config.normalization)
    stage = placement.get("vp_stage")
    last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=True) and not stage,
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=True) and stage in (None, last_chunk),
    }
    return GPTModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, transformer_engine, vp_stage=stage),
        **{**ends, **placement},
    )
