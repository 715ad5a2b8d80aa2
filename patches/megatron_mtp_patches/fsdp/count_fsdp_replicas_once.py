"""Declares count-fsdp-replicas-once."""

from ..declarations.shared_edits import GRAD_NORMS, ROUNDED_NORM
from ..engine import Patch, Wrap

_OPTIMIZER = "megatron.core.optimizer"
_WRAPPERS = "megatron_overrides.fsdp.replicas"

PATCH = Patch(
    id="count-fsdp-replicas-once",
    summary="Count each gradient once in the norm of Megatron-FSDP with no_shard, and in its number of zeros",
    problem="With `--use-megatron-fsdp` and `--data-parallel-sharding-strategy no_shard` each data-parallel rank has "
    "all gradients. On 0.16.1 and 0.17.1 the norm counts them once for each of these ranks. From 0.18 on (#3754) it "
    "is a sum over the ranks of tensor and pipeline parallelism, which is right for dense layers. With EP x ETP less "
    "than TP it counts experts several times; with EP x ETP greater than TP each rank counts its own experts only, "
    "so ranks clip by different norms, and the copies of all other weights drift apart. Nothing in the log shows it. "
    "With any strategy, `--log-num-zeros-in-grad` counts what tensor-parallel ranks replicate on each of them "
    "(#5879).",
    adds=(
        "With no_shard the norm, the number of zeros and the search for inf and NaN are sums over all ranks, to which "
        "each gradient contributes on one of them.",
        "With any strategy the number of zeros counts a gradient that tensor-parallel ranks replicate once.",
    ),
    numerics=(
        "With no_shard: the gradient norm shrinks to that of one copy of the model (0.16.1 and 0.17.1), or counts each "
        f"expert once (from 0.18 on), and gradients are clipped accordingly. {ROUNDED_NORM}"
    ),
    notes=(
        "The sum of the norm goes over all ranks in place of the tensor- and pipeline-parallel ones: as many "
        "collectives as before, of 16 bytes for each norm.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups", f"{_WRAPPERS}:build_counting_first_replicas"
        ),
        Wrap(f"{_OPTIMIZER}.clip_grads:count_zeros_fp32", f"{_WRAPPERS}:count_zeros_of_first_replicas"),
        *GRAD_NORMS,
    ),
)
