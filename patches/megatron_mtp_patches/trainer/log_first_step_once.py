"""Declares log-first-step-once."""

from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="log-first-step-once",
    summary="Leave the first step of a process out of its second log line",
    upstream=(PullRequest(7092, ended="merged after 2026-08-22"),),
    problem="Megatron prints a line for the first step of a process, whatever the interval, and keeps its sums for the "
    "line at the end of the interval. If the interval ends with this step, as with `--log-interval 1` or in a resume "
    "after step 19 with `--log-interval 10`, the second line counts it again: its losses and its step time are means "
    "that include it, so a resumed run seems to have other losses there than the run that it resumes. TensorBoard and "
    "Weights & Biases get the right losses.",
    adds=("A first step that ends an interval is followed by a new interval.",),
    numerics="The second line of the log, if the first step of the process ends an interval. Training itself does "
    "not change.",
    notes=(
        "With `--log-timers-to-tensorboard` the time of such a first step is in TensorBoard and Weights & Biases, as "
        "that of each other step.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.training.training:training_log",
            "megatron_overrides.trainer.log_interval:start_new_log_interval",
            check_source=False,
        ),
    ),
)
