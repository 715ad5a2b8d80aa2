"""Declares refresh-offloaded-params."""

from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="refresh-offloaded-params",
    summary="Step from the loaded weights after a load without the state of an optimizer on the CPU",
    upstream=(
        PullRequest(
            5071,
            part="`--load-main-params-from-ckpt` with the precision-aware optimizer stays without effect, as it is "
            "without offloading",
        ),
    ),
    problem="With `--optimizer-cpu-offload`, loading a model alone (`--finetune`, `--no-load-optim`, "
    "`--pretrained-checkpoint`) does not refresh the main weights of the optimizer nor their copies on the CPU, "
    "unless the optimizer is precision-aware. The first step writes the initial weights, plus one update, back "
    "into the model. Nothing in the log but the loss shows it. Megatron's own trainer insists on "
    "`--use-precision-aware-optimizer`; Megatron-Bridge and NeMo-RL do not.",
    adds=("After such a load the first step starts from the weights that were loaded.",),
    numerics="With `--optimizer-cpu-offload` and a load without the optimizer's state, where the main weights are not "
    "the optimizer's own: all weights, from the first step on.",
    notes=("Each load copies the main weights once. Steps are as they were.",),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params",
            "megatron_overrides.resume.offloaded_params:refresh_offloaded_params",
        ),
    ),
)
