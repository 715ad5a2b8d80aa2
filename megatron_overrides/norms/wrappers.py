"""The wrappers that tag parameters for separate norms, count zeros of what was clipped, and mark shards.

NVIDIA/Megatron-LM#4116. The tag of the MTP heads is `grad_norm_group = "mtp"`; the original pull request calls it
`is_mtp_param`, which is set as well.

NVIDIA/Megatron-LM#4084: layers mark their weights as shards only while they initialize them.

NVIDIA/Megatron-LM#3213: layers that each tensor-parallel rank has whole mark their weights as shards.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.norms.gradients import with_one_gradient
from megatron_overrides.norms.groups import tag, tagged_group
from megatron_overrides.norms.optimizer_tree import leaves
from megatron_overrides.norms.replicas import mark_shard
from megatron_overrides.norms.tags import tag_mtp_block, tag_mtp_blocks, tag_named_groups


def tag_block(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__: tags the parameters of the new block."""
    call.proceed()
    tag_mtp_block(call.instance)


def retag_mtp_heads(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...), with which every optimizer begins."""
    tag_mtp_blocks(as_list(call["model_chunks"]))
    return call.proceed()


def tag_groups(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...): parameters get the groups of --grad-norm-group."""
    tag_named_groups(as_list(call["model_chunks"]), call["config"])
    return call.proceed()


def count_zeros_of_fsdp(call: Call) -> float:
    """Wraps count_zeros_fp32, which looks for the gradients of Megatron-FSDP under one name (NVIDIA/Megatron-LM#4802).

    Before 0.19 that is `grad`, later the caller decides; here each parameter is asked for its gradient.
    """

    params = call["parameters"]
    params = [params] if hasattr(params, "grad") else params
    call["parameters"] = [with_one_gradient(p) if getattr(p, "__fsdp_param__", False) else p for p in params]
    return call.proceed()


def count_zeros_without_params(call: Call) -> float:
    """Wraps count_zeros of MegatronOptimizer and ChainedOptimizer: from 0.18 on both read params[0].

    A rank without parameters fails there, and the others hang in its all-reduce.
    """
    from megatron.core.optimizer.clip_grads import count_zeros_fp32

    is_shared = getattr(call.instance, "grads_states_parallel_group_is_shared", lambda: True)
    if any(leaf.get_parameters() for leaf in leaves(call.instance)) or not is_shared():
        return call.proceed()
    return count_zeros_fp32([], grad_stats_parallel_group=call.instance.get_grad_stats_parallel_group())


def copy_grad_norm_tags(call: Call) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source), called for every shard and main copy."""
    call.proceed()
    group = tagged_group(call["source_tensor"])
    if group is not None:
        tag(call["destination_tensor"], group)


def mark_uninitialized_rows(call: Call) -> None:
    """Wraps VocabParallelEmbedding.__init__ and ColumnParallelLinear.__init__, with shards of [rows / TP, ...]."""
    _mark_uninitialized_shard(call, 0)


def mark_uninitialized_columns(call: Call) -> None:
    """Wraps RowParallelLinear.__init__, whose weight is [rows, columns / TP]."""
    _mark_uninitialized_shard(call, 1)


def _mark_uninitialized_shard(call: Call, dimension: int) -> None:
    """Mark the weight as a shard where the layer, which does so as it initializes it, does not initialize it."""
    call.proceed()
    weight = call.instance.weight
    if weight is not None and not call["config"].perform_initialization:
        mark_shard(weight, dimension)
        weight.partition_stride = call.get("stride", 1)


def mark_duplicated_weights(call: Call) -> None:
    """Wraps TELinear.__init__: weights of a duplicated layer are copies, but TransformerEngine marks them as shards."""
    call.proceed()
    if call["parallel_mode"] == "duplicated":
        for param in call.instance.parameters():
            mark_shard(param, None)
