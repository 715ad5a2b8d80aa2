"""Declares pass-rope-scaling-factor."""

from ..engine import Patch, PullRequest, Wrap

_WRAPPERS = "megatron_overrides.attention.wrappers"

PATCH = Patch(
    id="pass-rope-scaling-factor",
    summary="Let --rope-scaling-factor reach the model",
    upstream=(PullRequest(6306),),
    problem=(
        "The builders of Megatron pass `--use-rope-scaling` to the model, but not `--rope-scaling-factor`. So "
        "every model scales its rotary embeddings by 8. A run of Llama 3.2, whose factor is 32, trains with wrong low "
        "frequencies, and no error. pretrain_vlm.py passes neither. Upstream's main has the same defect."
    ),
    adds=("A GPT that a run builds with `rope_scaling` has the factor of the run, unless its builder passes one.",),
    numerics="With `--use-rope-scaling` and a `--rope-scaling-factor` other than 8: all, from the first step on.",
    notes=(
        "A checkpoint that was trained with 8 goes on with the factor of its flags. `--rope-scaling-factor 8` restores "
        "what it was trained with.",
    ),
    is_repair=True,
    edits=(
        Wrap("megatron.core.models.gpt.gpt_model:GPTModel.__init__", f"{_WRAPPERS}:pass_rope_scaling_factor"),
        Wrap("megatron.training.argument_utils:gpt_config_from_args", f"{_WRAPPERS}:configure_rope_scaling_factor"),
    ),
)
