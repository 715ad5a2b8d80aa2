"""Declares split-fused-weights-for-muon."""

from ..declarations.settings import Setting, optimizer_setting
from ..engine import Patch, PullRequest, Wrap

_OPTIMIZER = "megatron.core.optimizer"
_WRAPPERS = "megatron_overrides.muon.fused_weights.separate_matrices"

PATCH = Patch(
    id="split-fused-weights-for-muon",
    summary="Orthogonalize each matrix of a fused weight by itself, if asked: gate and up, heads, GatedDeltaNet's",
    upstream=(
        PullRequest(
            6688,
            part="In #6688 `muon_split_glu` is on unless it is turned off; with the patch it is off unless "
            "`--muon-split-glu` is given. The patch refuses weights that generalized tensor parallelism has "
            "sliced, where the pull request gathers them.",
        ),
        PullRequest(
            6326,
            part="Of #6326 the patch brings `muon_split_qkv_per_head`. It does not bring what the pull request changes "
            "without that flag, where it cuts the weights of multi-latent attention into projections. The patch "
            "refuses a head that lies on two ranks, where the pull request gathers it.",
        ),
    ),
    problem="Megatron stores several matrices in one weight: gate and up of a gated MLP; the heads of query, key and "
    "value; the projections of GatedDeltaNet. Muon orthogonalizes such a weight as one matrix, and `linear_qkv` as "
    "three. So the update of a matrix depends on the others in its weight, and is not the one that Muon would make "
    "if each had a weight to itself.",
    adds=(
        "`--muon-split-glu`, `--muon-split-qkv-per-head` and `--muon-split-gdn`: each matrix is orthogonalized by "
        "itself and scaled by its own size (`--muon-scale-mode`), also in MTP heads, experts and shared experts.",
        "`--muon-split-glu`: `linear_fc1` of every gated MLP is two matrices, gate and up.",
        "`--muon-split-qkv-per-head`: each head of the query (and of the gate of gated attention), and the key and the "
        "value of each query group, is a matrix. In multi-latent attention a query head is two matrices, without and "
        "with position, as in #6326; a head of `linear_kv_up_proj` is its key and its value.",
        "`--muon-split-gdn`: `in_proj` of GatedDeltaNet is six matrices: q, k, v, z, b and a. The last two have a row "
        "for each value head, and are orthogonalized like the others.",
        "Gate and up, and the projections of GatedDeltaNet, are gathered over tensor-parallel ranks as "
        "`--muon-tp-mode` says. A head is whole on its rank, so it is not gathered in any mode.",
    ),
    undetected="No run goes wrong without it: which matrices Muon treats as one is a choice.",
    refuses=(
        "One of the flags with an optimizer other than Muon, or for a model that has no such weight.",
        "`--muon-split-qkv-per-head` with `--muon-no-split-qkv`, as in #6326, or where a head lies on two "
        "tensor-parallel ranks.",
        "Weights that generalized tensor parallelism has sliced.",
        "`--muon-split-glu` with `moe_use_legacy_grouped_gemm`, which stores all experts in one matrix (0.16).",
    ),
    numerics="Nothing changes without a flag. With one, each update of the weights that it splits changes in its "
    "direction. Its root mean square stays the same with `--muon-scale-mode spectral` (the default) and "
    "`shape_scaling`; with `unit_rms_norm` it shrinks where a matrix has fewer rows than columns, as a head does.",
    notes=(
        "The momentum has the shape of the weight, so a run can be resumed without a flag that it was started with, "
        "and the other way round.",
        "#5400 sends `in_proj` of GatedDeltaNet to Adam. `--muon-split-gdn` leaves it with Muon.",
        "If a Megatron has one of these fields, its own default and its own split are used.",
    ),
    edits=(
        *optimizer_setting(
            Setting(
                "muon_split_glu",
                bool,
                False,
                "Orthogonalize gate and up of gated MLPs, which are one weight, each by itself.",
                named_in=6688,
            )
        ),
        *optimizer_setting(
            Setting(
                "muon_split_qkv_per_head",
                bool,
                False,
                "Orthogonalize each head of query, key and value by itself, also of multi-latent attention.",
                named_in=6326,
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
