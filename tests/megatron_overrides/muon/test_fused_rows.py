"""Where the matrices of a fused weight lie, and what is refused before training: no optimizer is needed for that."""

from argparse import Namespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from megatron_mtp_patches.defects.labs.lab import make_optimizer

from megatron_overrides.muon.fused_weights.checks import asked_splits, check_muon_splits
from megatron_overrides.muon.fused_weights.layers import CannotSplitError, fused_weights
from megatron_overrides.muon.fused_weights.rows import FusedRows, halves, orthogonalize_pieces
from tests.trainings.muon import CHANNELS, FFN, SPLITS, make_model

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("split-fused-weights-for-muon")]

pytest.importorskip("transformer_engine", reason="grouped experts and GatedDeltaNet are TransformerEngine's")

GLU, HEADS, GDN = SPLITS


def pieces_of(rows, matrix):
    """The row numbers of each matrix, for a matrix whose every row holds its number."""
    seen = []

    def see(piece):
        seen.extend(piece.reshape(-1, piece.size(-2), piece.size(-1))[..., 0].tolist())
        return piece * 10

    assert torch.equal(orthogonalize_pieces(matrix, rows, see), matrix * 10)
    return seen


@pytest.mark.parametrize(
    "rows, expected",
    [
        (halves(8), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (halves(8, block=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (FusedRows((1, 2, 5)), [[0], [1, 2], [3, 4, 5, 6, 7]]),
        (FusedRows((2,), is_each_group_alone=True), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (FusedRows((1, 3), is_each_group_alone=True), [[0], [4], [1, 2, 3], [5, 6, 7]]),
        (FusedRows((1, 3), is_each_group_alone=True, in_batches=False), [[0], [4], [1, 2, 3], [5, 6, 7]]),
    ],
    ids=str,
)
def test_the_rows_of_each_matrix(rows, expected):
    assert pieces_of(rows, torch.arange(8.0)[:, None].expand(8, 3).contiguous()) == expected


def test_grouped_experts_may_be_interleaved():
    model = make_model("grouped experts")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.moe_mlp_glu_interleave_size = 4
    sizes = {one.name: one.rows.sizes for one in fused_weights(model, GLU)}
    assert sizes == {"linear_fc1.weight0": (4, 4), "linear_fc1.weight1": (4, 4), "linear_fc1.weight": (FFN, FFN)}


def test_rows_that_are_no_whole_heads_are_refused():
    model = make_model("dense")
    linear = model.decoder.layers[0].self_attention.linear_qkv
    linear.weight = torch.nn.Parameter(linear.weight[: 2 * CHANNELS + 1])
    with pytest.raises(
        CannotSplitError, match=r"decoder.layers.0.self_attention.linear_qkv.weight \(9, 16\) are not wh"
    ):
        list(fused_weights(model, HEADS))


def test_slices_of_rows_are_refused():
    model = make_model("dense")
    model.decoder.layers[0].mlp.linear_fc1.weight.is_gtp_weight_remat = True
    with pytest.raises(CannotSplitError, match="is a slice of rows"):
        list(fused_weights(model, GLU))


def test_experts_side_by_side_are_refused():
    class GroupedMLP(torch.nn.Module):
        config = Namespace(gated_linear_unit=True)

    with pytest.raises(CannotSplitError, match="--moe-use-legacy-grouped-gemm"):
        list(fused_weights(GroupedMLP(), GLU))


@pytest.mark.parametrize("setting", SPLITS)
def test_another_optimizer_is_refused(setting):
    spelled = f"--{setting.replace('_', '-')} .* the optimizer is adam"
    with pytest.raises(ValueError, match=spelled):
        check_muon_splits(Namespace(optimizer="adam", **{setting: True}))
    check_muon_splits(Namespace(optimizer="adam", **{setting: False}))
    check_muon_splits(Namespace(optimizer="dist_muon", **{setting: True}))
    config = OptimizerConfig(optimizer="adam", lr=0.1, **{setting: True})
    with pytest.raises(ValueError, match=spelled):
        get_megatron_optimizer(config, [ddp(make_model("GatedDeltaNet"))])


def test_heads_need_the_split_of_query_key_and_value():
    settings = Namespace(optimizer="muon", muon_split_qkv_per_head=True, muon_split_qkv=False)
    with pytest.raises(ValueError, match="--muon-no-split-qkv"):
        check_muon_splits(settings)


@pytest.mark.parametrize(
    "kind, setting, lacks",
    [("dense", GDN, "GatedDeltaNet"), ("GatedDeltaNet", GLU, "gated MLP"), ("GatedDeltaNet", HEADS, "attention layer")],
)
def test_a_model_without_such_a_weight_is_refused(kind, setting, lacks):
    with pytest.raises(ValueError, match=f"has nothing to split: the model has no {lacks}"):
        make_optimizer(ddp(make_model(kind)), optimizer="muon", **{setting: True})


def test_a_main_copy_is_marked_as_its_weight():
    weight, copy = torch.nn.Parameter(torch.ones(4, 2)), torch.ones(4, 2)
    weight.muon_fused_rows = halves(4)
    copy_tensor_model_parallel_attributes(copy, weight)
    assert copy.muon_fused_rows == halves(4)


def test_a_setting_that_megatron_has_itself_is_left_to_it(monkeypatch):
    settings = Namespace(optimizer="adam", muon_split_glu=True)
    assert asked_splits(settings) == [GLU]
    monkeypatch.setattr(OptimizerConfig.__dataclass_fields__[GLU], "metadata", {})
    assert asked_splits(settings) == []
    check_muon_splits(settings)


def ddp(model):
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
