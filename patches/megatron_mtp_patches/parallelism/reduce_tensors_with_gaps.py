"""Declares reduce-tensors-with-gaps."""

from ..engine import Patch, Probe, PullRequest, Wrap

_REDUCE = "megatron.core.tensor_parallel.mappings:_reduce"

PATCH = Patch(
    id="reduce-tensors-with-gaps",
    summary="Return the sum of a tensor that is not contiguous in memory from all-reduces over tensor-parallel ranks",
    upstream=(PullRequest(5338, native_since="0.19.0"),),
    problem="Up to 0.18 `reduce_from_tensor_model_parallel_region`, and the backward pass of "
    "`copy_to_tensor_model_parallel_region`, reduce a contiguous copy of their tensor and return the tensor. "
    "If it was not contiguous, each rank goes on with its own part of the sum. Megatron's own layers give "
    "contiguous tensors; a layer of yours may not.",
    adds=("What these functions return is the sum, for every tensor.",),
    numerics="Only for tensors that are not contiguous in memory.",
    is_repair=True,
    probe=Probe(_REDUCE, contains="torch.distributed.all_reduce(input_, group=group)"),
    edits=(Wrap(_REDUCE, "megatron_overrides.parallelism.reductions:reduce_contiguous_copy"),),
)
