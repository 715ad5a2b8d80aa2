"""Declares refuse-heads-that-verl-cannot-save."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="refuse-heads-that-verl-cannot-save",
    summary="Refuse MTP heads under verl that would be missing in its checkpoints, or keep other weights out of them",
    package="verl",
    problem="Under verl a model can train MTP heads (Megatron's MTP layers) that its config.json declares and its "
    "checkpoint lacks, as transformers saves DeepSeek-V3. They start at random values. Megatron-Bridge, by which "
    "verl saves, writes only tensors that this checkpoint has: the heads are in no checkpoint of verl's and in no "
    "weights for rollouts, and a resumed run starts them again. With `checkpoint.strict=true`, verl's default, "
    "Megatron-Bridge also leaves out each file of which it does not save all tensors. So if such a file has heads and "
    "the model has none, or heads with copies of the embedding and of the output layer, as DeepSeek-V3's, verl's "
    "checkpoints lack the other weights of this file, and a resume ends in an error.",
    adds=("The run ends with an error on all ranks, when the model is built, that names the tensors and what to do.",),
    undetected="Only runs under verl have the defect, and only the checkpoint tells.",
    refuses=(
        "Training under verl of heads that the base lacks, with `mtp_init` or without, unless "
        "`use_dist_checkpointing` saves all of the model.",
        "With `checkpoint.strict=true`, a base with tensors of heads that Megatron-Bridge does not save in a file with "
        "weights that it does, where `checkpoint.save_contents` has it save the weights. Whether the run saves at all "
        "(`trainer.save_freq`), the workers do not know.",
    ),
    numerics="None.",
    unasked="verl ends a run whose checkpoints would lack MTP heads, or other weights because of them.",
    notes=("It patches verl. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine._build_megatron_module",
            "megatron_overrides.frameworks.verl_heads:refuse_heads_that_are_not_saved",
        ),
    ),
)
