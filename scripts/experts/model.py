"""A small mixture of experts with an MTP head, of TransformerEngine's layers: one forward and backward pass."""

from __future__ import annotations

from typing import Any

import torch

from scripts.experts.conditions import Layout

VOCABULARY, LENGTH, BATCH, EXPERTS, SEED = 32, 16, 2, 4, 5


def initialize(layout: Layout) -> None:
    """Set up Megatron's process groups."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def make_config(layout: Layout, has_bias: bool, **settings: Any) -> Any:
    """The TransformerConfig of the model."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        mtp_num_layers=1,
        add_bias_linear=has_bias,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        init_method_std=0.2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        **settings,
    )


def make_model(config: Any, distributed_optimizer: bool) -> Any:
    """A seeded bf16 GPTModel in Megatron's DDP; `distributed_optimizer` shards its gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    net = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True),
    )
    # Biases begin at zero; others show in the parameter norm whether they are counted.
    with torch.no_grad():
        for name, param in net.named_parameters():
            if ".bias" in name:
                param.fill_(0.1)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, ddp, net.bfloat16().cuda())


def backward(model: Any, step: int = 0) -> None:
    """One pass over tokens of this data-parallel rank; its gradients are in `main_grad`, reduced over the ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    seed = 100 * step + parallel_state.get_data_parallel_rank()
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).cuda()
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, -1)
    model.zero_grad_buffer()
    loss = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    loss.mean().backward()
    finalize_model_grads([model], None)
