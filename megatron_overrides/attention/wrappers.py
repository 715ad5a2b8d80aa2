"""The wrappers around Megatron's attention and its position embeddings."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.norms.shard_marks import mark_shard
from megatron_overrides.run_arguments import arguments_of_run

# The class up to 0.19, and what it and GatedDeltaNet2 have in common on main; their modules depend on the release.
_BASES_OF_GATED_DELTA_NET = {"GatedDeltaNet", "_GDNBase"}


def mark_attention_sinks(call: Call) -> None:
    """Wraps DotProductAttention.__init__ and that of TransformerEngine's layer (NVIDIA/Megatron-LM#7530).

    With --softmax-type learnable each rank has the sinks of its own heads, [heads / TP]: a shard, as its weights are.
    """
    call.proceed()
    sinks = getattr(call.instance, "softmax_offset", None)
    if isinstance(sinks, torch.nn.Parameter):
        mark_shard(sinks, 0)


def scale_indexer_loss(call: Call) -> Any:
    """Wraps forward_step_calc_loss: the indexer's loss of sparse attention gets the weight of other auxiliary losses.

    NVIDIA/Megatron-LM#4070, #5244: the scale of the loss and, without --calculate-per-token-loss, the context-parallel
    size over the number of microbatches.
    """
    config = call["config"]
    outputs = call.proceed()
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core import parallel_state
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        scale = torch.ones(1, device=torch.cuda.current_device())
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not config.calculate_per_token_loss:
            size = call["cp_group_size"]  # None from the schedule that overlaps the communication of experts
            size = parallel_state.get_context_parallel_world_size() if size is None else size
            scale = scale * size / call["num_microbatches"]
        DSAIndexerLossAutoScaler.set_loss_scale(scale)
    return outputs


def sum_gradients_of_output_norms(call: Call) -> None:
    """Wraps _allreduce_non_tensor_model_parallel_grads, which leaves out the output norm of GatedDeltaNet.

    NVIDIA/Megatron-LM#7452: each tensor-parallel rank has a copy of its weight and the gradient of its own heads. With
    sequence parallelism Megatron adds these up. Without, they are scaled and go with those that it averages.
    """
    from megatron.core import parallel_state

    group = call["tp_group"]
    size = (parallel_state.get_tensor_model_parallel_group() if group is None else group).size()
    if size == 1 or call["config"].sequence_parallel:
        call.proceed()
        return
    weights = [
        param
        for chunk in call["model"]
        for module in chunk.modules()
        if _BASES_OF_GATED_DELTA_NET.intersection(one.__name__ for one in type(module).__mro__)
        for param in module.out_norm.parameters()
        if param.requires_grad and not hasattr(param, "average_gradients_across_tp_domain")
    ]
    for weight in weights:
        gradient = getattr(weight, "main_grad", weight.grad)
        if gradient is not None:
            gradient.mul_(size)
        weight.average_gradients_across_tp_domain = True
    call.proceed()
    for weight in weights:
        del weight.average_gradients_across_tp_domain


def pass_rope_scaling_factor(call: Call) -> None:
    """Wraps GPTModel.__init__: where the builder of a run passes no factor, it is --rope-scaling-factor.

    NVIDIA/Megatron-LM#6306.
    """
    is_passed = _is_passed(call, "rope_scaling_factor")  # before the arguments are asked by name
    factor = getattr(arguments_of_run(), "rope_scaling_factor", None)
    if call["rope_scaling"] and factor is not None and not is_passed:
        call["rope_scaling_factor"] = factor
    call.proceed()


def pass_rotary_settings_to_language_model(call: Call) -> None:
    """Wraps LLaVAModel.__init__: what a script does not pass is --rotary-base and --rope-scaling-factor.

    NVIDIA/Megatron-LM#6586: it has defaults for both, and gives its GPT these.
    """
    run = arguments_of_run()
    values = {name: getattr(run, name, None) for name in ("rotary_base", "rope_scaling_factor")}
    missing = [name for name, value in values.items() if value is not None and not _is_passed(call, f"language_{name}")]
    for name in missing:
        call[f"language_{name}"] = values[name]
    call.proceed()


def _is_passed(call: Call, name: str) -> bool:
    """True if the caller gives this argument itself."""
    return name in call.kwargs or len(call.args) > list(call.parameters).index(name)


def configure_rope_scaling_factor(call: Call) -> Any:
    """Wraps gpt_config_from_args (0.19, main), which leaves the factor of the model's configuration at 8."""
    config = call.proceed()
    if getattr(call["args"], "rope_scaling_factor", None) is not None:
        config.rope_scaling_factor = call["args"].rope_scaling_factor
    return config


def count_gradient_once(call: Call) -> Any:
    """Wraps flash_attn_a2a_communicate_softmax_offset of TransformerEngine.

    It deals out the sinks, [1, heads, 1, 1], over the context-parallel ranks, and gathers their gradient and the
    largest logits, [heads]. Megatron adds up the gradients of all ranks, so each gets its share of the gathered one.
    """
    gathered = call.proceed()
    is_gradient = call["tensor"] is not None and call["h_dim"] == 1 and not call["before_attn"]
    return gathered / call["cp_size"] if is_gradient else gathered
