"""Declares split-fused-weights-for-muon."""

from ..engine import Patch, PullRequest, Wrap
from ..settings import Setting, optimizer_setting

_OPTIMIZER = "megatron.core.optimizer"
_WRAPPERS = "megatron_overrides.muon.split_wrappers"

PATCH = Patch(
    id="split-fused-weights-for-muon",
    summary="Orthogonalize each matrix of a fused weight by itself, if asked: gate and up, heads, GatedDeltaNet's",
    upstream=(
        PullRequest(
            6688,
            part=(
                "In #6688 gate and up are split unless `--muon-no-split-glu` is given. With the patch they are split if "
                "`--muon-split-glu` is. Slices of rows of generalized tensor parallelism are refused."
            ),
        ),
        PullRequest(
            6326,
            part=(
                "Of #6326 the patch brings `muon_split_qkv_per_head`. It does not bring what the pull request changes "
                "without that flag: multi-latent attention cut into four projections. A head that lies on "
                "two ranks is refused, where the pull request gathers it."
            ),
        ),
    ),
    problem=(
        "Megatron stores several matrices in one weight: gate and up of a gated MLP, the heads of query, key and value, "
        "the projections of GatedDeltaNet. Muon orthogonalizes such a weight as one matrix (`linear_qkv` as three). "
        "The result depends on what happens to lie in the same weight, and differs from that of the same model with "
        "separate weights."
    ),
    adds=(
        "Each matrix is orthogonalized by itself and scaled by its own size (`--muon-scale-mode`), in MTP heads, in "
        "experts and in shared experts, too.",
        "Gate, up and the projections of GatedDeltaNet are gathered over tensor-parallel ranks as `--muon-tp-mode` says. A "
        "head is whole on its rank, so heads are gathered in no mode.",
        "b and a of GatedDeltaNet, with a row for each value head, are matrices like q, k, v and z.",
    ),
    undetected="Which matrices Muon is to treat as one is a choice; no run goes wrong without the patch.",
    refuses=(
        "One of the flags with an optimizer other than Muon, or for a model that has no such weight.",
        "`--muon-split-qkv-per-head` with `--muon-no-split-qkv`, as in #6326.",
        "A tensor-parallel size that cuts through heads, weights that are slices of generalized tensor parallelism, and "
        "`--muon-split-glu` with `--moe-use-legacy-grouped-gemm` (0.16).",
    ),
    numerics=(
        "Nothing without a flag. With one, every update of the weights that it splits. With `spectral` scaling the update "
        "of a part is smaller if the larger side of the part is smaller than that of the whole: see the table of its page."
    ),
    notes=(
        "The momentum has the shape of the weight, so a checkpoint of a run with a flag is resumed without it, and the "
        "other way round.",
        "#5400 sends `in_proj` of GatedDeltaNet to Adam instead. `--muon-split-gdn` leaves it with Muon.",
        "Where Megatron has a field of one of these names itself, its own default and its own split are used.",
    ),
    edits=(
        *optimizer_setting(
            Setting(
                "muon_split_glu",
                bool,
                False,
                "Orthogonalize gate and up of gated MLPs, which are one weight, each by itself.",
            )
        ),
        *optimizer_setting(
            Setting(
                "muon_split_qkv_per_head",
                bool,
                False,
                "Orthogonalize each head of query, key and value by itself, of multi-latent attention, too.",
            )
        ),
        *optimizer_setting(
            Setting(
                "muon_split_gdn",
                bool,
                False,
                "Orthogonalize q, k, v, z, b and a of GatedDeltaNet, which are one weight, each by itself.",
            )
        ),
        Wrap(f"{_OPTIMIZER}.muon:get_megatron_muon_optimizer", f"{_WRAPPERS}:mark_fused_weights"),
        Wrap(f"{_OPTIMIZER}:_get_megatron_emerging_optimizer", f"{_WRAPPERS}:mark_fused_weights"),
        Wrap(
            "megatron.core.tensor_parallel.layers:copy_tensor_model_parallel_attributes",
            f"{_WRAPPERS}:copy_fused_rows",
            check_source=False,
        ),
        *(
            Wrap(f"{_OPTIMIZER}.{module}:TensorParallelMuon.orthogonalize", f"{_WRAPPERS}:orthogonalize_each_matrix")
            for module in ("muon", "emerging_optimizers")
        ),
    ),
)
