"""Declares split-gated-qkv-for-muon."""

from ..engine import Patch, Probe, PullRequest, Wrap

_OPTIMIZER = "megatron.core.optimizer"
_WRAPPERS = "megatron_overrides.muon.gated_qkv"
_SHAPES = f"{_OPTIMIZER}.emerging_optimizers:_get_qkv_split_shapes"

PATCH = Patch(
    id="split-gated-qkv-for-muon",
    summary="Orthogonalize query, gate, key and value of gated attention separately",
    upstream=(
        PullRequest(
            4728,
            native_since="0.19.0",
            part="Of #4728 the patch brings the four sizes. It does not bring `qkv_split_shapes` on each parameter and "
            "its main copy: one configuration decides for all QKV weights of the optimizer, and a weight whose "
            "rows these sizes do not divide raises an error, where upstream leaves it whole.",
        ),
    ),
    problem="Muon splits the fused QKV weight into query, key and value, and orthogonalizes each. With "
    "`attention_output_gate` (Qwen3-Next, Qwen3.5) the weight also holds the gate, which is as large as the query, "
    "and Megatron splits as if it were not there. Where the rows happen to divide, pieces are made of rows of the "
    "query, the gate, the key and the value; where they do not, the first step raises an error.",
    adds=("With `attention_output_gate`, `qkv_split_shapes` of Muon has four sizes: query, gate, key and value.",),
    numerics="Only with Muon, `attention_output_gate` and without `--muon-no-split-qkv`: the update of the QKV "
    "weights, if there was one. All other updates are the same to the bit.",
    notes=(
        "All QKV weights are taken for whole query groups of query, gate, key and value. In ms-swift, which stores the "
        "gate of each head after its query, the two pieces before key and value have rows of both. With more "
        "tensor-parallel ranks than query groups, or a vision tower of Megatron-Bridge that trains, sizes may not "
        "divide; then the first step raises an error, as without the patch. `--muon-no-split-qkv` avoids all three.",
    ),
    is_repair=True,
    probe=Probe(_SHAPES, contains="getattr(model_cfg, 'attention_output_gate', False)"),
    edits=(
        Wrap(_SHAPES, f"{_WRAPPERS}:insert_gate"),
        Wrap(f"{_OPTIMIZER}.muon:get_megatron_muon_optimizer", f"{_WRAPPERS}:split_gate_from_query"),
    ),
)
