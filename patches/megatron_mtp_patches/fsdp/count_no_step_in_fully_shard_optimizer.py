"""Declares count-no-step-in-fully-shard-optimizer."""

from ..engine import Patch, Probe, PullRequest, Wrap

_MODULE = "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard"

PATCH = Patch(
    id="count-no-step-in-fully-shard-optimizer",
    summary="Create the state of an optimizer under Megatron-FSDP without counting a step",
    upstream=(PullRequest(5976, native_since="main"),),
    problem="`fully_shard_optimizer` of Megatron-FSDP (0.17 and later) creates the state of the optimizer by a step "
    "with gradients of zero. That step counts: Adam corrects the bias of its first real step as if it were the "
    "second, so that its update is 1.34 times too small (with betas of 0.9 and 0.999), and weight decay shrinks the "
    "parameters once more.",
    adds=(
        "That step has a learning rate and a weight decay of zero. Afterwards the counts of steps are what they were "
        "before it: 0 for an optimizer that has not stepped.",
    ),
    undetected="No flag leads there: Megatron's trainer does not call `fully_shard_optimizer` (nor `fully_shard`, "
    "which calls it). Callers of it are affected.",
    numerics="Only for optimizers given to `fully_shard_optimizer` or `fully_shard` on 0.17 to 0.19: the first updates "
    "grow to what the same optimizer does without Megatron-FSDP.",
    notes=("The report is NVIDIA/Megatron-LM#5974.",),
    is_repair=True,
    probe=Probe(f"{_MODULE}:fully_shard_optimizer", contains="optimizer_group_settings"),
    edits=(
        Wrap(f"{_MODULE}:fully_shard_optimizer", "megatron_overrides.fsdp.fully_shard:create_state_without_a_step"),
    ),
)
