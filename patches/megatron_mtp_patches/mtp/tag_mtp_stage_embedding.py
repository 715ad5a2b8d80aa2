"""Declares tag-mtp-stage-embedding."""

from ..engine import Patch, Probe, PullRequest, Wrap

_SETUP = "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer"

PATCH = Patch(
    id="tag-mtp-stage-embedding",
    summary="Tag the word embedding of the MTP stage as an embedding",
    upstream=(PullRequest(5034, native_since="0.18.0"), PullRequest(5180, twin_of=5034)),
    problem="With pipeline parallelism the stage of the MTP heads (Megatron's MTP layers) holds a copy of the word "
    "embedding, and no optimizer recognises it as an embedding. Stage 0 trains its copy with Adam and "
    "`--decoupled-lr`, the MTP stage trains its copy with Muon and the plain learning rate, and the two copies "
    "drift apart.",
    adds=(
        "`is_embedding_or_output_parameter` on that weight, which `--decoupled-lr`, Muon, dist_muon and Megatron-FSDP "
        "read.",
    ),
    numerics="With MTP heads, more than one pipeline stage, and one of `--decoupled-lr`, Muon or dist_muon. Plain Adam "
    "trains as before.",
    notes=(
        "Memory: with dist_muon the tag costs the rank that owns the copy Adam's second moment of it, 4 bytes for "
        "each element.",
        "Checkpoints: the weight moves to another parameter group on the MTP stage. A checkpoint with Muon or "
        "`--decoupled-lr` in the `torch` format that was written without the tag does not fit; `torch_dist` "
        "checkpoints do.",
    ),
    is_repair=True,
    probe=Probe(_SETUP, contains="self.pre_process or getattr(self, 'mtp_process', False)"),
    edits=(Wrap(_SETUP, "megatron_overrides.mtp.heads.stage_weights:tag_mtp_stage_embedding"),),
)
