"""Declares chunk-mtp-logits."""

from ..engine import AddField, Patch, Probe
from ..shared_edits import CHECK_SETTINGS, CHECK_TRANSFORMER_CONFIG, DEFAULT_IN_YAML, MTP_LOSS, TRANSFORMER_CONFIG

PATCH = Patch(
    id="chunk-mtp-logits",
    summary="Compute the losses of the MTP heads without the logits of all positions",
    problem=(
        "Each MTP head (Megatron's MTP layers) makes logits of all its positions and keeps them, or their softmax, "
        "until backward. With 131,072 tokens in the vocabulary, 4,096 positions and float32 that is 2 GiB for each "
        "copy and each head."
    ),
    adds=(
        "`--mtp-logits-chunk-size N` (`config.mtp_logits_chunk_size`): N rows of logits at a time, those of the main "
        "model included where the loss needs them. 0 (default) computes cross entropy as Megatron does.",
    ),
    undetected="It saves memory; no number is wrong without it.",
    refuses=("`--mtp-logits-chunk-size` with `--defer-embedding-wgrad-compute`, or below 0.",),
    numerics=(
        "Only with the flag. Losses and gradients differ by rounding: a matmul of fewer rows may round otherwise, and "
        "the chunks are added one after the other. Attached heads project each chunk again in the backward pass; "
        "detached heads do not."
    ),
    probe=Probe(f"{TRANSFORMER_CONFIG}.mtp_logits_chunk_size"),
    edits=(
        AddField(
            TRANSFORMER_CONFIG,
            field="mtp_logits_chunk_size",
            type=int,
            default=0,
            doc="Rows of logits that the losses of the MTP heads make at a time (0: those of all positions).",
        ),
        DEFAULT_IN_YAML,
        *CHECK_SETTINGS,
        CHECK_TRANSFORMER_CONFIG,
        *MTP_LOSS,
    ),
)
