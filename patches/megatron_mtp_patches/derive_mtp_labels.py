"""Train MTP heads without labels: take them from the tokens.

Upstream: NVIDIA/Megatron-LM#3457, native since 0.19.0.
Without it: an RL trainer, which calls the model without labels, cannot train MTP heads (0.17, 0.18) or crashes (0.16).
Adds: with `labels=None`, the target of head k at position i is token i + k + 1 of `input_ids`, within its own sequence
    where sequences are packed and across context-parallel ranks; `loss_mask` then belongs to the tokens and moves with
    them. `roll_tensor(None)` is (None, None).
Repairs: full activation recomputation of an MTP model raised TypeError (0.18);
    under --overlap-moe-expert-parallel-comm the labels were one token too far (0.19, main);
    every forward pass without gradients (evaluation, log probabilities) ran the heads and their logits for nothing
    (all releases). Now they run under torch.no_grad() only where another pipeline stage waits for them, or
    nvidia-modelopt looks at them.
Changes numbers: MTP heads get a gradient where labels are None; nothing else.
"""

from .engine import Patch, Probe, PullRequest, Wrap
from .shared_edits import MTP, MTP_LOSS, MTP_OVERRIDES, SCHEDULED_MTP_LAYER

_RECORD_INPUTS = f"{MTP_OVERRIDES}.forward_pass:record_forward_inputs"
_RESTORE_TOKENS = "megatron_overrides.core.models.common.fine_grained_callables:restore_main_model_tokens"

PATCH = Patch(
    id="derive-mtp-labels",
    doc=__doc__,
    upstream=(PullRequest(3457, native_since="0.19.0"),),
    probe=Probe(f"{MTP}:process_mtp_loss", contains="input_ids is None"),
    repairs=True,
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
