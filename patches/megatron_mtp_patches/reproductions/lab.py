"""What reproductions share: process groups, small models, and plain references beside them."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH = 32, 16


def start(seed: int = 1, **sizes: int) -> None:
    """Start torch.distributed and Megatron's groups: start(tensor_model_parallel_size=2)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def make_config(**settings: Any) -> Any:
    """A TransformerConfig of two small layers without dropout, unless `settings` say otherwise."""
    from megatron.core.transformer import TransformerConfig

    defaults: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    defaults |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    return TransformerConfig(**(defaults | settings))


def make_gpt(config: Any, transformer_engine: bool = False, **placement: Any) -> Any:
    """This rank's stage of a GPT with the MTP heads that `config` asks for.

    Its layers are Megatron's own, or with `transformer_engine` those of TransformerEngine, which has to be installed.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    experts = (config.num_moe_experts, config.moe_grouped_gemm)
    if transformer_engine:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(*experts)
    else:
        spec = specs.get_gpt_layer_local_spec(*experts)
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    heads = specs.get_gpt_mtp_block_spec(config, spec, transformer_engine) if config.mtp_num_layers else None
    settings = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
    return GPTModel(config, spec, mtp_block_spec=heads, **{**settings, **ends, **placement})


def make_ddp(config: Any, module: Any, **settings: Any) -> Any:
    """`module` in Megatron's DDP; a setting is one of DistributedDataParallelConfig."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(config, DistributedDataParallelConfig(**settings), module)


def make_optimizer(*chunks: Any, **settings: Any) -> Any:
    """Megatron's optimizer of model chunks in DDP; a setting is one of OptimizerConfig."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(OptimizerConfig(**({"optimizer": "adam", "lr": 1e-2} | settings)), list(chunks))


def tokens(batch: int = 1, length: int = LENGTH) -> tuple[Any, Any]:
    """Random tokens and their positions, each [batch, length]."""
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randint(VOCABULARY, (batch, length), generator=generator)
    return chosen, torch.arange(length).repeat(batch, 1)


def norm(*tensors: Any) -> float:
    """The norm of all entries, in float64."""
    return float(sum((tensor.double() ** 2).sum() for tensor in tensors) ** 0.5)


def sum_over_ranks(number: float) -> float:
    """The sum of a number of each rank."""
    total = torch.tensor(float(number), dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)


def gather(value: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
