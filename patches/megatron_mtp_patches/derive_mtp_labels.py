"""Declares derive-mtp-labels."""

from .engine import Patch, Probe, PullRequest, Wrap
from .shared_edits import MTP, MTP_LOSS, MTP_OVERRIDES, SCHEDULED_MTP_LAYER

_RECORD_INPUTS = f"{MTP_OVERRIDES}.forward_pass:record_forward_inputs"
_RESTORE_TOKENS = "megatron_overrides.core.models.common.fine_grained_callables:restore_main_model_tokens"

PATCH = Patch(
    id="derive-mtp-labels",
    summary="Train MTP heads without labels: derive them from the tokens",
    upstream=(PullRequest(3457, native_since="0.19.0"),),
    problem="An RL trainer calls the model without labels. Then 0.17 and 0.18 train no MTP head, and 0.16 crashes.",
    adds=(
        "With `labels=None` the target of head k at position i is token i + k + 1 of `input_ids`, within its own "
        "sequence where sequences are packed, and across context-parallel ranks.",
        "A `loss_mask` that is given without labels belongs to the tokens and moves with them.",
        "`roll_tensor(None)` is `(None, None)`.",
    ),
    repairs=(
        "Full activation recomputation of an MTP model raised a TypeError (0.18).",
        "Under `--overlap-moe-expert-parallel-comm` the derived labels were one token too far (0.19, main).",
        "Every forward pass without gradients (evaluation, log probabilities) computed the heads and their logits for "
        "nothing (all releases). Under `torch.no_grad()` they are computed only where another pipeline stage waits "
        "for them, or where nvidia-modelopt looks at them.",
    ),
    numerics="MTP heads get a gradient where labels are None. Nothing else changes.",
    probe=Probe(f"{MTP}:process_mtp_loss", contains="input_ids is None"),
    edits=(
        *MTP_LOSS,
        Wrap("megatron.core.models.gpt.gpt_model:GPTModel._postprocess", _RECORD_INPUTS),
        Wrap("megatron.core.models.hybrid.hybrid_model:HybridModel.forward", _RECORD_INPUTS),
        Wrap("megatron.core.models.mamba.mamba_model:MambaModel.forward", _RECORD_INPUTS),
        Wrap(f"{MTP}:MultiTokenPredictionBlock.forward", f"{MTP_OVERRIDES}.forward_pass:skip_idle_block"),
        Wrap(f"{MTP}:roll_tensor", f"{MTP_OVERRIDES}.roll:roll_nothing", check_source=False),
        Wrap(
            f"{MTP}:MultiTokenPredictionLayer._checkpointed_forward", f"{MTP_OVERRIDES}.recompute:accept_padding_mask"
        ),
        *(Wrap(target, _RESTORE_TOKENS) for target in SCHEDULED_MTP_LAYER),
    ),
)
