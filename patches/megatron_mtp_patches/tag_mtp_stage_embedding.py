"""Declares tag-mtp-stage-embedding."""

from .engine import Patch, Probe, PullRequest, Wrap

_SETUP = "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer"

PATCH = Patch(
    id="tag-mtp-stage-embedding",
    summary="Tag the word embedding of the MTP stage as an embedding",
    upstream=(PullRequest(5034, native_since="0.18.0"), PullRequest(5180, twin_of=5034)),
    problem=(
        "With pipeline parallelism the MTP stage holds a copy of the word embedding that no optimizer recognises as "
        "one. Stage 0 trains its copy with Adam and `--decoupled-lr`, the MTP stage with Muon and the plain learning "
        "rate, so the two copies drift apart."
    ),
    adds=(
        "`is_embedding_or_output_parameter` on that weight, which decoupled_lr, Muon, dist_muon and Megatron-FSDP "
        "read.",
    ),
    numerics="With MTP heads, more than one pipeline stage, and one of those features. Plain Adam trains as before.",
    notes=(
        "Memory: Adam's second moment of the copy, 4 bytes for each element, on the rank that owns it.",
        "Checkpoints: the weight moves to another parameter group on the MTP stage. A Muon or decoupled_lr checkpoint "
        "in the `torch` format that was written without the tag does not fit; `torch_dist` ones do.",
    ),
    probe=Probe(_SETUP, contains="self.pre_process or getattr(self, 'mtp_process', False)"),
    edits=(
        Wrap(
            _SETUP,
            "megatron_overrides.core.models.common.language_module.language_module:tag_mtp_stage_embedding",
        ),
    ),
)
