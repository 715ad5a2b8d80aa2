"""Code that reproductions share: process groups, small models, and plain references beside them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

VOCABULARY, LENGTH = 32, 16


def start(seed: int = 1, **sizes: int) -> None:
    """Start torch.distributed and Megatron's groups: start(tensor_model_parallel_size=2).

    Without torch.cuda there are no random states, so the attention of a model cannot be computed.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl" if torch.get_default_device().type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
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

    if config.num_moe_experts:
        spec = specs.get_gpt_decoder_block_spec(config, transformer_engine)
    elif transformer_engine:
        spec = specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = specs.get_gpt_layer_local_spec()
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    heads = specs.get_gpt_mtp_block_spec(config, spec, transformer_engine) if config.mtp_num_layers else None
    settings = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
    model = GPTModel(config, spec, mtp_block_spec=heads, **{**settings, **ends, **placement})
    return model.to(torch.get_default_device())  # TransformerEngine's layers are initialized on the CPU


def make_sparse_gpt(**settings: Any) -> Any:
    """A GPT of one layer with sparse attention (DSA) on MLA, on one rank.

    The indexer leaves out its Hadamard transforms, which change no score: they rotate queries and keys alike.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.experimental_attention_variant import dsa

    dsa.rotate_activation = lambda activation: activation
    sizes: dict[str, Any] = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 4,
    }
    sizes |= {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4, "dsa_indexer_loss_coeff": 0.0}
    defaults: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "rope_type": "rope"}
    defaults |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm"}
    defaults |= {"experimental_attention_variant": "dsa", "add_bias_linear": False, **sizes}
    config = MLATransformerConfig(**(defaults | settings))
    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope")


def make_fused_mla(delays_weight_gradients: bool = False, **settings: Any) -> tuple[Any, Any]:
    """MLA of TransformerEngine's layers with a fused down projection, and hidden states [length, 1, hidden size]."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    sizes = {"q_lora_rank": 8, "kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}
    defaults: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "rope_type": "rope"}
    defaults |= {"normalization": "RMSNorm", "add_bias_linear": False, "mla_down_proj_fusion": True, **sizes}
    config = MLATransformerConfig(**(defaults | settings))
    config.delay_wgrad_compute = delays_weight_gradients  # Megatron asks for experts as well
    spec = specs.get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, mla_down_proj_fusion=True)
    attention = build_module(spec.submodules.self_attention, config=config, layer_number=1)
    return attention, torch.ones(LENGTH, 1, config.hidden_size, requires_grad=True)


def run_microbatches(model: Any, count: int, forward_only: bool = False) -> list[Any]:
    """Run equal microbatches by Megatron's schedule; their losses, on the last pipeline stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(_: Any, chunk: Any) -> tuple[Any, Any]:
        ids, positions = tokens()
        return chunk(ids, positions, None, labels=ids), lambda losses: (losses.mean(), losses.mean().item())

    schedule = get_forward_backward_func()
    return schedule(
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=count,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def make_ddp(config: Any, module: Any, **settings: Any) -> Any:
    """`module` in Megatron's DDP; a setting is one of DistributedDataParallelConfig."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(config, DistributedDataParallelConfig(**settings), module)


def make_optimizer(*chunks: Any, **settings: Any) -> Any:
    """Megatron's optimizer of model chunks in DDP; a setting is one of OptimizerConfig."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(**({"optimizer": "adam", "lr": 1e-2} | settings))
    if "muon" not in config.optimizer or find_spec("megatron.core.optimizer.emerging_optimizers"):
        return get_megatron_optimizer(config, list(chunks))
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer  # before 0.18 Muon is made here alone

    is_layer_wise = config.optimizer == "dist_muon"
    return get_megatron_muon_optimizer(config, list(chunks), layer_wise_distributed_optimizer=is_layer_wise)


def compute_gradients(model: Any, microbatches: int = 1, ids: Any = None) -> None:
    """Run a schedule of Megatron's and leave the reduced gradients in `main_grad`.

    The `ids` of this rank's tokens are [1, length]; None for those of `tokens`.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    same_ids, positions = tokens()
    ids = same_ids if ids is None else ids
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()

    def forward_step(batches: Any, model: Any) -> Any:
        loss = model(ids, positions, mask, labels=ids.roll(-1, 1))
        return loss, lambda loss: (loss.mean(), {})

    model.config.finalize_model_grads_func = finalize_model_grads
    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(()),
        model=[model],
        num_microbatches=microbatches,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )


def mean_mtp_loss(loss_mask: Any, loss: float, **settings: Any) -> float:
    """Return this rank's part of the mean loss of an MTP head if each of its tokens has the same loss.

    It is the gradient of a factor of all losses. `loss_mask` has the form [length].
    """
    config = make_config(mtp_num_layers=1, mtp_loss_scaling_factor=1.0, **settings)
    model = make_gpt(config, position_embedding_type="learned_absolute")
    factor = torch.ones((), requires_grad=True)
    model.compute_language_model_loss = lambda labels, logits: factor * (loss + 0.0 * logits.sum(-1).t())
    length = len(loss_mask)
    ids, positions = tokens(length=length)
    attention_mask = torch.ones(1, 1, length, length).tril().logical_not()
    output = model(ids, positions, attention_mask, labels=ids, loss_mask=loss_mask.float().unsqueeze(0))
    (0.0 * output.sum()).backward()
    return float(factor.grad)


def mtp_loss_of_cut_sequence(masked: int = 8, **settings: Any) -> tuple[float, float]:
    """The mean loss of an MTP head over a sequence that two context-parallel ranks share, and what they contribute.

    The loss mask leaves out the first 8 of 16 tokens, or none. A token of the head has the loss 10 on the first rank,
    which has the ends of the sequence, and 2 on the other. Nothing follows the last token, so it does not count.
    """
    start(context_parallel_size=2)
    first, second, third, fourth = torch.arange(16).chunk(4)
    is_first_rank = torch.distributed.get_rank() == 0
    positions = torch.cat([first, fourth] if is_first_rank else [second, third])
    part = mean_mtp_loss(positions >= masked, 10.0 if is_first_rank else 2.0, **settings)
    followers = positions + 1
    ends, middle = gather(int(((followers >= masked) & (followers < 16)).sum()))
    return (10 * ends + 2 * middle) / (ends + middle), sum_over_ranks(part)


def norm_of_expert_gradients(
    parts: str, optimizer: str = "adam", expert_parallel: int = 2, **settings: Any
) -> tuple[float, float]:
    """The gradient norm, and that of the optimizer, where each gradient of experts' `parts` is 1 and the others are 0.

    Two tensor-parallel ranks have an expert each, or both of them the same two with an `expert_parallel` of 1.
    """
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    sizes |= {"expert_model_parallel_size": expert_parallel}
    start(**sizes)
    config = make_config(num_moe_experts=2, moe_grouped_gemm=True, sequence_parallel=True, **sizes, **settings)
    model = make_ddp(config, make_gpt(config, transformer_engine=True).bfloat16())
    chosen = [param for name, param in model.named_parameters() if ".experts." in name and f".{parts}" in name]
    for param in chosen:
        param.main_grad.fill_(1.0)
    _, seen, _ = make_optimizer(model, optimizer=optimizer, bf16=True).step()
    replicas = 2 // expert_parallel
    return (sum_over_ranks(sum(param.numel() for param in chosen)) / replicas) ** 0.5, float(seen)


def take_step(model: Any, optimizer: Any, gradient: float = 0.01) -> None:
    """A step of the optimizer in which each entry of each gradient is `gradient`."""
    for param in model.parameters():
        param.main_grad.fill_(gradient)
    optimizer.step()


def resume(before: dict[str, Any], after: dict[str, Any], **scheduling: Any) -> tuple[list[float], list[float]]:
    """The learning rates of a run with the OptimizerConfig `before`, and those of one with `after` that resumes it.

    There is one for each parameter group. Both runs have the distributed optimizer and a constant schedule;
    `scheduling` are settings of OptimizerParamScheduler.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rates: dict[str, Any] = {"init_lr": 0.0, "min_lr": 0.0, "lr_decay_style": "constant", "lr_warmup_steps": 0}
    rates |= {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant", "wd_incr_steps": 9, "lr_decay_steps": 9}
    states: list[Any] = []
    seen = []
    for settings in (before, after):
        config = make_config()
        model = make_ddp(config, make_gpt(config), use_distributed_optimizer=True)
        optimizer = make_optimizer(model, use_distributed_optimizer=True, **settings)
        scheduler = OptimizerParamScheduler(optimizer, max_lr=settings["lr"], **(rates | scheduling))
        for part, state in zip((optimizer, scheduler), states, strict=False):
            part.load_state_dict(state)
        scheduler.step(1)
        take_step(model, optimizer)
        seen.append([group["lr"] for group in optimizer.param_groups])
        states = [optimizer.state_dict(), scheduler.state_dict()]
    return seen[0], seen[1]


def make_generator(seed: int) -> torch.Generator:
    """One for tensors of the default device, which is a GPU in a standalone file."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def tokens(batch: int = 1, length: int = LENGTH) -> tuple[Any, Any]:
    """Random tokens and their positions, each [batch, length]."""
    chosen = torch.randint(VOCABULARY, (batch, length), generator=make_generator(7))
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
