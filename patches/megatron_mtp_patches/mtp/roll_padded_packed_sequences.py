"""Declares roll-padded-packed-sequences."""

from ..declarations.shared_edits import MTP, MTP_LOSS
from ..engine import Override, Patch, PullRequest, Wrap

_ROLL = "megatron_overrides.mtp.packed.padded_roll"
_WRAPPERS = "megatron_overrides.mtp.packed.rolled_tokens"

PATCH = Patch(
    id="roll-padded-packed-sequences",
    summary="Train MTP heads on the right tokens of packed sequences with padding",
    upstream=(PullRequest(4494, ended="merged into branch dev"), PullRequest(3035, native_since="0.17.0")),
    problem="MTP heads (Megatron's MTP layers) get their inputs and targets by rolling tokens, labels and masks to the "
    "left. For packed sequences the roll reads `cu_seqlens_q`, but where sequences are padded their tokens lie at "
    "`cu_seqlens_q_padded`. So heads train on tokens of other sequences and on padding, and other targets are "
    "lost; under context parallelism ranks exchange the wrong tokens, and a sequence that is short enough raises "
    "an IndexError. Of the 42 targets of three heads in a pack of four sequences, 11 are lost and 23 positions "
    "train on a wrong one; with the patch none.",
    adds=(
        "If `packed_seq_params` has a separate `cu_seqlens_q_padded`, tokens lie at its offsets, and each sequence has "
        "the length that `cu_seqlens_q` gives: padding is neither a target nor an input, and the loss and the "
        "acceptance rate do not count it, whatever the mask is. This holds with labels and without, on one rank and on "
        "context-parallel ranks, for empty sequences and those shorter than a chunk.",
        "If there is no loss mask, padding does not count as a token of the main model either (for "
        "`--calculate-per-token-loss`).",
        "A `padding_mask` of packed sequences (0.18 and later) marks padding where there is no next token. Before, the "
        "MoE router of a head took such positions for tokens.",
        "An empty packed sequence without `cu_seqlens_q_padded` raises no error under context parallelism (0.16).",
    ),
    repairs=(
        "The pull request, which is in upstream's branch dev, rolls within the padded bounds. So without a loss mask, "
        "or with one that is 1 on padding, heads still train on the padding after each sequence (#7278). With this "
        "patch they do not.",
        "The pull request sends a message to each neighbour for each sequence, with a host-device sync for its "
        "bounds. With this patch there is one message to each neighbour for all sequences, and no host-device sync.",
    ),
    numerics="Only for packed sequences with a `cu_seqlens_q_padded` that is not the same tensor as `cu_seqlens_q`: "
    "there the loss of the heads, their acceptance rate and their gradient change (the page has figures). With a "
    "`padding_mask`, the router of a head no longer sees the last slot of a packed sequence as a token. All else "
    "rolls as before, to the bit.",
    notes=("The reports are NVIDIA/Megatron-LM#4495, #6205, #6912 and #7278.",),
    is_repair=True,
    edits=(
        Wrap(f"{MTP}:_roll_tensor_packed_seq", f"{_WRAPPERS}:roll_packed_sequences"),
        Override(f"{MTP}:ones_without_padding", f"{_ROLL}:ones_without_padding", where="missing"),
        *MTP_LOSS,
        Wrap(f"{MTP}:MultiTokenPredictionLayer._get_embeddings", f"{_WRAPPERS}:roll_padding_mask"),
    ),
)
