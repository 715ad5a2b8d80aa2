"""Declares replace-fsdp-gradients-by-their-mean."""

from ..engine import Patch, Probe, PullRequest, Wrap

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_REDUCE = f"{_FSDP}.param_and_grad_buffer:GradReducePipeline._bucket_group_gradient_reduce"

PATCH = Patch(
    id="replace-fsdp-gradients-by-their-mean",
    summary="Train on the mean of all ranks' gradients alone under Megatron-FSDP's optim",
    upstream=(PullRequest(3067, native_since="0.17.0", part="what a rank gets of a reduction"),),
    problem="On 0.16.1 with `--data-parallel-sharding-strategy optim` and `--overlap-grad-reduce` each data-parallel "
    "rank adds the mean of all gradients to its own. Nothing in the log shows it.",
    adds=("The mean takes the place of a rank's own gradients.",),
    numerics="With `optim` and `--overlap-grad-reduce` on 0.16.1: all gradients.",
    is_repair=True,
    probe=Probe(_REDUCE, contains="gbuf.is_data_distributed or custom_grad_comm_dtype"),
    edits=(Wrap(_REDUCE, "megatron_overrides.fsdp.gradient_sums:put_reduced_shards_in_place"),),
)
