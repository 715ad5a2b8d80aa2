"""Declares reduce-fsdp-gradients-of-replicas."""

from ..engine import Patch, Probe, PullRequest, Wrap

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_REDUCE = f"{_FSDP}.param_and_grad_buffer:ParamAndGradBuffer.all_reduce_gradients"
_WRAPPERS = "megatron_overrides.fsdp.replicas"

PATCH = Patch(
    id="reduce-fsdp-gradients-of-replicas",
    summary="Train with Megatron-FSDP's no_shard whatever is overlapped",
    upstream=(PullRequest(3754, native_since="0.18.0"),),
    problem="On 0.16 and 0.17 `no_shard`, the default of `--data-parallel-sharding-strategy`, never reduces gradients "
    "without `--overlap-grad-reduce`, so each data-parallel rank trains a different model; nothing in the log "
    "shows it. Without `--overlap-param-gather` the first step ends in an AttributeError about fetch_bucket.",
    adds=("Gradients are reduced once, at the end of a step, and parameters that are not sharded are not gathered.",),
    numerics="Only with no_shard and without one of the two flags, where training was wrong or ended.",
    is_repair=True,
    probe=Probe(_REDUCE, contains="gbuf is None"),
    edits=(
        Wrap(_REDUCE, f"{_WRAPPERS}:reduce_gradients_of_replicas"),
        Wrap(f"{_FSDP}.megatron_fsdp:MegatronFSDP.start_param_sync", f"{_WRAPPERS}:gather_no_replicas"),
    ),
)
