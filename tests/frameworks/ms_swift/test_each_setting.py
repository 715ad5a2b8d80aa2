"""Each setting of the patches alone, as an argument of `megatron sft`: it trains, or is refused by its name."""

import pytest
from megatron_mtp_patches.catalog import SETTINGS
from megatron_mtp_patches.declarations.settings import OPTIMIZER_CONFIG

from tests.conformance.inspection import choose_value

pytestmark = [pytest.mark.forked("torch"), pytest.mark.guards("add-settings-to-ms-swift")]

EDITS = [edit for edit, setting in SETTINGS.items() if edit.target == OPTIMIZER_CONFIG or setting.in_ms_swift]
DETACHED, MUON = ("--mtp_detach_heads", "true"), ("--optimizer", "muon")
# What a setting needs beside it.
BESIDE = {
    "mtp_dpace_alpha": ("--mtp_position_weights", "dpace"),
    "mtp_clip_grad": DETACHED,
    "mtp_grad_norm_skip_threshold": DETACHED,
    "muon_split_glu": MUON,
    "muon_split_qkv_per_head": MUON,
    "muon_split_gdn": MUON,
}
# Values that fit the model, where the one of other tests does not.
VALUES = {"grad_norm_group": ["mlp=[.]mlp[.]:1"], "mtp_min_lr": 1e-4, "mtp_dpace_alpha": 0.3}
REFUSALS = {"muon_split_gdn": "--muon_split_gdn has nothing to split: the model has no GatedDeltaNet"}


NOT_SAVED = ["--split_dataset_ratio", "0", "--save_steps", "1000"]


def words_of(value):
    """The value as ms-swift's parser reads it."""
    values = value if isinstance(value, list) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.field)
def test_a_setting_trains_or_is_refused_by_its_name(megatron, edit):
    value = VALUES.get(edit.field, choose_value(edit))
    arguments = [f"--{edit.field}", *words_of(value), *BESIDE.get(edit.field, ())]
    arguments += NOT_SAVED
    if edit.field in REFUSALS:
        assert REFUSALS[edit.field] in megatron("sft", "sft", edit.field, 1, *arguments, refused=True)
        return
    (line,) = megatron("sft", "sft", edit.field, 1, *arguments).training
    assert line["loss"] > 0.0 and line["grad_norm"] > 0.0


def test_a_limit_for_heads_without_a_separate_norm_is_refused_by_its_name(megatron):
    output = megatron("sft", "sft", "limit", 1, "--mtp_clip_grad", "0.05", *NOT_SAVED, refused=True)
    assert "--mtp_clip_grad needs MTP heads with a separate norm" in output
