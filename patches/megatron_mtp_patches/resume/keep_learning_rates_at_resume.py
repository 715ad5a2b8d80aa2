"""Declares keep-learning-rates-at-resume."""

from ..engine import Patch, Probe, PullRequest, Wrap

_GROUPS = "megatron_overrides.resume.param_groups"
_LEARNING_RATES = "megatron_overrides.resume.learning_rates"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_SCHEDULER = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"

PATCH = Patch(
    id="keep-learning-rates-at-resume",
    summary="Resume each parameter group with its own learning rate, and let a run override it",
    upstream=(
        PullRequest(
            4705,
            native_since="0.19.0",
            part="groups are paired by their settings, and where these differ by their order",
        ),
        PullRequest(3720, native_since="main", part="without giving all groups one learning rate (#7173)"),
    ),
    problem="Up to 0.18 a checkpoint tells parameter groups by their multipliers alone. After a resume all groups that "
    "differ only in their learning rates have that of the last one, so `--decoupled-lr` and the rates of muP are "
    "lost; nothing in the log shows it. `--override-opt-param-scheduler` with a new `--lr` or `--min-lr` has no "
    "effect there. On 0.19.2 (#4705) the learning rate tells groups, and a resume with another one ends in an error, "
    "with this flag or without it. On main (#3720) the flag gives all groups `--lr`.",
    adds=(
        "Each group gets the settings of its own counterpart in the checkpoint: the one with the same settings, else "
        "the one in the same place among those with the same multipliers.",
        "`--override-opt-param-scheduler` gives each group the learning rates that it has in a new run with these "
        "flags.",
    ),
    repairs=(
        "A resume with another learning rate ended in an error (0.19.2).",
        "`--override-opt-param-scheduler` gave all groups `--lr` and `--min-lr` (main).",
    ),
    refuses=(
        "A resume whose flags divide the parameters into another number of groups than the optimizer of the checkpoint "
        "has.",
    ),
    numerics="After a resume with an optimizer: the learning rates of groups that differ only in these, up to 0.18; "
    "those of a run with `--override-opt-param-scheduler`, on all releases.",
    notes=(
        "Checkpoints are the same. One that was saved by a run whose groups had lost their learning rates has the "
        "wrong ones: resume it once with `--override-opt-param-scheduler`.",
    ),
    is_repair=True,
    probe=Probe(f"{_OPTIMIZER}:_param_group_override_keys"),
    edits=(
        Wrap(f"{_OPTIMIZER}:MegatronOptimizer._filter_and_reorder_param_groups", f"{_GROUPS}:pair_saved_groups"),
        Wrap(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
            f"{_GROUPS}:load_groups_in_pairs",
        ),
        Wrap(
            "megatron.core.dist_checkpointing.serialization:load",
            f"{_GROUPS}:refuse_other_division",
            check_source=False,
        ),
        Wrap(f"{_SCHEDULER}.__init__", f"{_LEARNING_RATES}:remember_learning_rates", check_source=False),
        Wrap(f"{_SCHEDULER}.load_state_dict", f"{_LEARNING_RATES}:override_learning_rates"),
        Wrap(
            "megatron.training.checkpointing:load_checkpoint",
            f"{_LEARNING_RATES}:override_learning_rates_of_groups",
            check_source=False,
        ),
    ),
)
