"""Declares pass-rope-scaling-factor."""

from ..engine import Patch, PullRequest, Wrap

_WRAPPERS = "megatron_overrides.attention.rope_settings"

PATCH = Patch(
    id="pass-rope-scaling-factor",
    summary="Let --rope-scaling-factor reach the model",
    upstream=(PullRequest(6306, ended="merged after 2026-08-22"),),
    problem="The builders of Megatron pass `--use-rope-scaling` to the model, but not `--rope-scaling-factor`. So "
    "every model scales its rotary embeddings by 8. A run of Llama 3.2, whose factor is 32, trains with wrong low "
    "frequencies, and no error. Upstream's main of 2026-08-22 has the same defect. Up to 0.19 pretrain_vlm.py does not "
    "pass `--rotary-base` either (#6586): its language model uses 10000.",
    adds=(
        "A GPT that a run builds with `rope_scaling` has the factor of the run, unless its builder passes one.",
        "The language model of a LLaVAModel has the factor and the `--rotary-base` of the run, unless the script "
        "passes them.",
    ),
    numerics="With `--use-rope-scaling` and a `--rope-scaling-factor` other than 8, and in pretrain_vlm.py with a "
    "`--rotary-base` other than 10000: all, from the first step on.",
    notes=(
        "A checkpoint that was trained with 8 goes on with the factor of its flags. `--rope-scaling-factor 8` restores "
        "what it was trained with, and in pretrain_vlm.py `--rotary-base 10000`.",
    ),
    is_repair=True,
    edits=(
        Wrap("megatron.core.models.gpt.gpt_model:GPTModel.__init__", f"{_WRAPPERS}:pass_rope_scaling_factor"),
        Wrap(
            "megatron.core.models.multimodal.llava_model:LLaVAModel.__init__",
            f"{_WRAPPERS}:pass_rotary_settings_to_language_model",
            check_source=False,
        ),
        Wrap("megatron.training.argument_utils:gpt_config_from_args", f"{_WRAPPERS}:configure_rope_scaling_factor"),
    ),
)
