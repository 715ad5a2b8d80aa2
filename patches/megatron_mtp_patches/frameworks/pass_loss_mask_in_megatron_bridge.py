"""Declares pass-loss-mask-in-megatron-bridge."""

from ..engine import Patch, PullRequest, Wrap

_STEP = "megatron.bridge.training.gpt_step"
_OVERRIDES = "megatron_overrides.frameworks.bridge_loss_mask"

PATCH = Patch(
    id="pass-loss-mask-in-megatron-bridge",
    summary="Give the loss mask of Megatron-Bridge's gpt_step to the MTP loss",
    package="Megatron-Bridge",
    upstream=(PullRequest(6105, repository="NVIDIA-NeMo/Megatron-Bridge"),),
    problem="Megatron-Bridge's `gpt_step` gives the loss mask to the main loss alone "
    "(NVIDIA-NeMo/Megatron-Bridge#6103). So the MTP heads (Megatron's MTP layers) train on every position: in SFT on "
    "prompts and on padding. Their loss and the acceptance rate also count these positions, and padding is easy to "
    "predict.",
    adds=(
        "`gpt_step` passes the mask to a model with heads, as NVIDIA-NeMo/Megatron-Bridge#6105 does and Megatron-LM's "
        "own trainer: in training and validation, with packed sequences, and under context parallelism as the part "
        "that the labels have. DeepSeek-V4's step is repaired with it.",
    ),
    undetected="Only runs under Megatron-Bridge have the defect.",
    numerics="The MTP loss, its gradient and the metrics of the heads, where the mask leaves out positions.",
    is_repair=True,
    notes=(
        "It patches Megatron-Bridge. If the package is not installed, the patch is pending.",
        "The other steps of Megatron-Bridge, as `vlm_step`, are left as they are.",
    ),
    edits=(
        Wrap(f"{_STEP}:get_batch", f"{_OVERRIDES}:note_loss_mask"),
        Wrap(f"{_STEP}:_forward_step_common", f"{_OVERRIDES}:pass_loss_mask"),
    ),
)
