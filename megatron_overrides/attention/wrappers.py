"""What is called in place of Megatron's functions for attention and its position embeddings."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.norms.replicas import mark_shard
from megatron_overrides.run_arguments import arguments_of_run


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
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        scale = torch.ones(1, device=torch.cuda.current_device())
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not config.calculate_per_token_loss:
            scale = scale * (call["cp_group_size"] or 1) / call["num_microbatches"]
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
        if any(one.__name__ == "GatedDeltaNet" for one in type(module).__mro__)  # its module depends on the release
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
    names = list(call.parameters)
    is_passed = "rope_scaling_factor" in call.kwargs or len(call.args) > names.index("rope_scaling_factor")
    factor = getattr(arguments_of_run(), "rope_scaling_factor", None)
    if call["rope_scaling"] and factor is not None and not is_passed:
        call["rope_scaling_factor"] = factor
    call.proceed()


def configure_rope_scaling_factor(call: Call) -> Any:
    """Wraps gpt_config_from_args (0.19, main), which leaves the factor of the model's configuration at 8."""
    config = call.proceed()
    if getattr(call["args"], "rope_scaling_factor", None) is not None:
        config.rope_scaling_factor = call["args"].rope_scaling_factor
    return config
