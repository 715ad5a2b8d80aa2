"""Declares read-tensor-metadata-of-newer-torch."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="read-tensor-metadata-of-newer-torch",
    summary="Compare a checkpoint with the model under torch 2.15",
    problem="Before it compares a checkpoint with the model, Megatron passes each property by which torch describes a "
    "saved tensor to `torch.empty`. Torch 2.15 has a further one, `strides`, which `torch.empty` does not take, so "
    "`--load` with a `--dist-ckpt-strictness` other than the default ends in a TypeError, as do "
    "`dist_checkpointing.load_tensors_metadata`, `load_sharded_metadata` and `load_plain_tensors`. It makes no "
    "difference which torch saved the checkpoint.",
    adds=("Properties of a newer torch are left out. What Megatron compares, names and shapes, does not need them.",),
    numerics="None.",
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata",
            "megatron_overrides.resume.tensor_metadata:leave_out_new_tensor_properties",
        ),
    ),
)
