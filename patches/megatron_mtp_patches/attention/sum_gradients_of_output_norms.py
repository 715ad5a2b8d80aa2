"""Declares sum-gradients-of-output-norms."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="sum-gradients-of-output-norms",
    summary="Train the output norm of GatedDeltaNet on the heads of all tensor-parallel ranks",
    problem="With tensor parallelism and without `--sequence-parallel` each rank has a copy of the output norm's "
    "weight of a GatedDeltaNet layer, and updates it with the gradient of its own heads. The copies drift apart, a "
    "checkpoint has the first rank's, and each learns from a part of the heads (NVIDIA/Megatron-LM#7452).",
    adds=("The gradients of the copies are added up, so all ranks make the same update.",),
    numerics="With GatedDeltaNet layers, tensor parallelism and without `--sequence-parallel`: the gradients of the "
    "output norms, and with them the gradient norm.",
    notes=(
        "One all-reduce of these weights' gradients over the tensor-parallel ranks in each step. Copies that have "
        "drifted apart stay apart: a resume from a checkpoint makes them the same.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
            "megatron_overrides.attention.output_norms:sum_gradients_of_output_norms",
        ),
    ),
)
