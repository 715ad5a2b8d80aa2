"""Declares scatter-mtp-embeddings."""

from ..declarations.shared_edits import MTP
from ..engine import Patch, Probe, PullRequest, Wrap

_GET_EMBEDDINGS = f"{MTP}:MultiTokenPredictionLayer._get_embeddings"

PATCH = Patch(
    id="scatter-mtp-embeddings",
    summary="Train MTP heads of multimodal models under sequence parallelism",
    upstream=(PullRequest(6256, native_since="main"),),
    is_repair=True,
    probe=Probe(_GET_EMBEDDINGS, contains="scatter_to_sequence_parallel_region"),
    problem="Multimodal models build their language model with `scatter_embedding_sequence_parallel=False`, put images "
    "and audio into the embedded sequence, and scatter it over the tensor-parallel ranks themselves. MTP heads "
    "(Megatron's MTP layers) call the embedding once more and do not scatter: with sequence parallelism each rank "
    "has its part of the hidden states and all of the embedded tokens, and the first head raises a RuntimeError "
    "about their sizes.",
    adds=("A head scatters what it embeds where the embedding does not.",),
    numerics="None of a run that trained before. Where the patch acts, losses and gradients are those of a model whose "
    "embedding scatters, to the bit.",
    notes=(
        "`scatter_embedding_sequence_parallel` is an argument of the model, which no flag of `pretrain_gpt.py` sets; "
        "`doctor` finds the defect in the configurations of a trainer.",
    ),
    edits=(Wrap(_GET_EMBEDDINGS, "megatron_overrides.mtp.heads.scattered_embeddings:scatter_embeddings"),),
)
