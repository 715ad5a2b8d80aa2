"""Declares refuse-heads-that-verl-cannot-save."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="refuse-heads-that-verl-cannot-save",
    summary="Refuse to train MTP heads under verl that its checkpoints would leave out",
    package="verl",
    problem="Under verl a model can train MTP heads (Megatron's MTP layers) that its config.json declares and its "
    "checkpoint lacks, as transformers saves DeepSeek-V3. They start at random values. Megatron-Bridge, by which "
    "verl saves, writes only tensors that this checkpoint has: the heads are in no checkpoint of verl's and in no "
    "weights for rollouts, and a resumed run starts them again.",
    adds=("The run ends with an error on all ranks, when the model is built, that names the heads and what to do.",),
    undetected="Only runs under verl have the defect, and only the checkpoint tells.",
    refuses=(
        "Training under verl of heads that the base lacks, with `mtp_init` or without, unless "
        "`use_dist_checkpointing` saves all of the model.",
    ),
    numerics="None.",
    unasked="verl ends a run that would train MTP heads which its checkpoints leave out.",
    notes=("It patches verl. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine._build_megatron_module",
            "megatron_overrides.frameworks.verl_heads:refuse_heads_that_are_not_saved",
        ),
    ),
)
