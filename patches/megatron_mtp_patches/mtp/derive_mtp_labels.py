"""Declares derive-mtp-labels."""

from ..declarations.shared_edits import MTP, MTP_FORWARD_PASS, MTP_LOSS, SCHEDULED_MTP_LAYER
from ..engine import Patch, Probe, PullRequest, Wrap

_RESTORE_TOKENS = "megatron_overrides.mtp.packed.rolled_tokens:restore_main_model_tokens"

PATCH = Patch(
    id="derive-mtp-labels",
    summary="Train MTP heads without labels: derive them from the tokens",
    upstream=(PullRequest(3457, native_since="0.19.0"),),
    problem="RL trainers call the model without labels and compute their own loss from the logits. Then 0.17 and 0.18 "
    "do not train the MTP heads (Megatron's MTP layers), and 0.16 crashes.",
    adds=(
        "With `labels=None` the heads derive their labels from the tokens: the target of head k at position i is "
        "token i + k + 1 of `input_ids`. This holds within each packed sequence, and across context-parallel ranks.",
        "A `loss_mask` without labels is aligned with the tokens (1 if a token is part of the response) and moves "
        "with them. A `loss_mask` with labels is aligned with the labels, as before.",
        "A warning, once, if heads that are not detached train the main model by such labels.",
        "`roll_tensor(None)` returns `(None, None)`.",
    ),
    repairs=(
        "Full activation recomputation with MTP heads raised a TypeError about `padding_mask` (0.18).",
        "With `--overlap-moe-expert-parallel-comm` the derived labels were one token too far (0.19.2, main).",
        "Under `torch.no_grad()` (evaluation, log probabilities of a policy or a reference) the MTP block, its logits "
        "and its loss were computed and not used (all releases): with D heads, D transformer layers and D passes "
        "through the output layer. They are skipped now, but not in three cases: validation that reports the heads "
        "(`mtp-acceptance-length`), a pipeline stage that sends the hidden states of the heads to another stage, and a "
        "model that nvidia-modelopt has quantized or whose heads it distils, because modelopt calibrates without "
        "gradients and observes what the heads compute. Under Megatron-FSDP with `optim_grads_params` (main: with any "
        "strategy) the block runs, and only its logits and its loss are skipped: Megatron-FSDP gathers the weights of "
        "the heads before they run and releases them after.",
    ),
    numerics="If labels are None, the heads get a gradient: the same as with the labels that a data set makes from "
    "these tokens (tested to the bit). Passes without gradients no longer log an MTP loss. Nothing else changes.",
    unasked="MTP heads also train where the model is called without labels, as in RL, and the main model through them "
    "unless they are detached. Forward passes without gradients compute no MTP loss.",
    turned_off_by="`mtp_pass(compute=False)`",
    notes=(
        "The arguments of `process_mtp_loss` after `config` are keyword-only, because releases differ in their order.",
    ),
    probe=Probe(f"{MTP}:process_mtp_loss", contains="input_ids is None"),
    edits=(
        *MTP_LOSS,
        *MTP_FORWARD_PASS,
        Wrap(f"{MTP}:roll_tensor", "megatron_overrides.mtp.packed.rolled_tokens:roll_nothing", check_source=False),
        Wrap(
            f"{MTP}:MultiTokenPredictionLayer._checkpointed_forward",
            "megatron_overrides.mtp.heads.recomputed_layers:accept_padding_mask",
        ),
        *(Wrap(target, _RESTORE_TOKENS) for target in SCHEDULED_MTP_LAYER),
    ),
)
