"""Mark the parameters of experts with what they are: shards or replicas, and of which process groups.

NVIDIA/Megatron-LM#5916. Three readers depend on the marks: the norms, which count each gradient once
(`tensor_model_parallel`), DDP and the optimizers, which reduce over the ranks that hold replicas (`allreduce`), and
Muon, which puts the shards of a matrix together (`partition_dim`).
"""

from __future__ import annotations

import re
from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.norms.shard_marks import mark_shard

# By parallel mode: the dimension along which parameters are split over the ranks of the expert tensor-parallel group.
_DIMENSIONS = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}
_NUMBERED = re.compile(r"(weight|bias)\d*")  # weight3: of the fourth expert of a grouped layer


def mark_expert_parameters(layer: Any, parallel_mode: str | None, config: Any) -> None:
    """Mark the parameters that `layer`, a linear layer of experts, has itself.

    TransformerEngine from 2.13 on marks no weight of grouped experts as a shard, and none of its versions marks their
    biases. Megatron reduces the gradients of experts over the data-parallel ranks of the dense layers unless
    `expert_model_parallel_size` is larger than 1; that is wrong as well if experts are split over another
    number of tensor-parallel ranks than dense layers: several of these ranks hold the same expert, or none does.

    Args:
        parallel_mode: "column" or "row"; anything else leaves the marks of shards as they are.
        config: the TransformerConfig.
    """
    has_own_groups = (
        config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    dimensions = _DIMENSIONS.get(parallel_mode or "")
    for name, param in layer.named_parameters(recurse=False):
        param.allreduce = not has_own_groups
        kind = _NUMBERED.fullmatch(name)
        if dimensions and kind:
            mark_shard(param, dimensions.get(kind[1]))


_PARALLEL_MODES = {"linear_fc1": "column", "linear_fc2": "row"}


def copy_expert_mark(call: Call) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source): a shard of an expert's parameter stays one."""
    call.proceed()
    if hasattr(call["source_tensor"], "allreduce"):
        call["destination_tensor"].allreduce = call["source_tensor"].allreduce


def _mark_experts(parallel_mode: str, call: Call) -> None:
    call.proceed()
    if call.get("is_expert"):
        mark_expert_parameters(call.instance, parallel_mode, call["config"])


def mark_experts_of_column_layer(call: Call) -> None:
    """Wraps ColumnParallelLinear.__init__ and TEColumnParallelLinear.__init__: marks the parameters of an expert's."""
    _mark_experts("column", call)


def mark_experts_of_row_layer(call: Call) -> None:
    """Wraps RowParallelLinear.__init__ and TERowParallelLinear.__init__: marks the parameters of an expert's."""
    _mark_experts("row", call)


def mark_experts_of_linear(call: Call) -> None:
    """Wraps TELinear.__init__ and TEGroupedLinear.__init__, which are told how the layer is split."""
    call.proceed()
    if call.get("is_expert"):
        mark_expert_parameters(call.instance, call.get("parallel_mode"), call["config"])


def mark_experts_of_layer(call: Call) -> None:
    """Wraps MoELayer.__init__: marks the parameters of its experts.

    Linear layers mark their own; GroupedMLP of 0.16.1 has weights without a linear layer.
    """
    call.proceed()
    for path, module in call.instance.experts.named_modules():
        mark_expert_parameters(module, _PARALLEL_MODES.get(path.rpartition(".")[2]), call.instance.config)
