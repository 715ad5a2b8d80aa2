"""Declares chunk-mtp-logits."""

from ..declarations.settings import TRANSFORMER_CONFIG, Setting, model_setting
from ..declarations.shared_edits import MTP_LOSS
from ..engine import Patch, Probe

CHUNK_SIZE = Setting(
    "mtp_logits_chunk_size",
    int,
    0,
    "Rows of logits that the losses of the MTP heads make at a time (0: those of all positions).",
    unit="rows, or 0 for all at once",
    check="megatron_overrides.mtp.losses.checks:check_chunks",
    in_ms_swift=True,
)

PATCH = Patch(
    id="chunk-mtp-logits",
    summary="Compute the losses of the MTP heads without the logits of all positions",
    problem="Each MTP head (Megatron's MTP layers) makes logits of all its positions and keeps them, or their softmax, "
    "until backward. With 131,072 tokens in the vocabulary, 4,096 positions and float32 that is 2 GiB for each "
    "copy and each head.",
    adds=(
        "`--mtp-logits-chunk-size N` (`config.mtp_logits_chunk_size`): N rows of logits at a time, those of the main "
        "model included where the loss needs them. 0 (default) computes cross entropy as Megatron does.",
    ),
    undetected="It saves memory; no number is wrong without it.",
    refuses=("`--mtp-logits-chunk-size` with `--defer-embedding-wgrad-compute`, or below 0.",),
    numerics="Only with the flag. Losses and gradients differ by rounding: a matmul of fewer rows may round "
    "otherwise, and the chunks are added one after the other. Attached heads project each chunk again in the "
    "backward pass; detached heads do not.",
    probe=Probe(f"{TRANSFORMER_CONFIG}.mtp_logits_chunk_size"),
    edits=(*model_setting(CHUNK_SIZE), *MTP_LOSS),
)
