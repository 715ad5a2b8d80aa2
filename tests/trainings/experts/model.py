"""A small mixture of experts with an MTP head, of TransformerEngine's layers: one forward and backward pass."""

from __future__ import annotations

from typing import Any

import torch

from scripts.tiny_gpt import build_gpt, make_config
from tests.trainings.experts.conditions import WITH_REPLICAS, Layout

VOCABULARY, LENGTH, BATCH, EXPERTS, SEED, STEPS = 32, 16, 2, 4, 5, 3


def make_model(layout: Layout, has_bias: bool, distributed_optimizer: bool) -> Any:
    """A seeded bf16 GPTModel in Megatron's DDP; `distributed_optimizer` shards its gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    config = make_config(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=16,
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
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    net = build_gpt(config, VOCABULARY, LENGTH, transformer_engine=True, tied=False)
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


def largest_difference_of_replicas(optimizer: str) -> float:
    """Train a model of the layout WITH_REPLICAS for three steps; return how far two copies of an expert are apart."""
    import torch.distributed as dist

    from tests.trainings.experts.norms import make_optimizer

    model = make_model(WITH_REPLICAS, has_bias=False, distributed_optimizer=optimizer == "distributed optimizer")
    trainer = make_optimizer(optimizer, model)
    for step in range(STEPS):
        backward(model, step)
        trainer.step()
    largest = torch.zeros(())
    for name, param in model.named_parameters():
        if ".experts." in name:
            first_ranks_weight = param.detach().clone()
            dist.broadcast(first_ranks_weight, src=0)
            largest = largest.maximum((param - first_ranks_weight).abs().max().float())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
