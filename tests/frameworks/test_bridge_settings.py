"""Megatron-Bridge's own `pretrain` with each setting of the patches alone, and with the repairs alone."""

import re
from functools import partial

import pytest
from megatron_mtp_patches.catalog import SETTINGS
from megatron_mtp_patches.declarations.settings import OPTIMIZER_CONFIG

from tests.conformance.inspection import choose_value
from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .bridge_runs import EXPERTS, pretrain, run_interpreter, words

pytestmark = pytest.mark.forked("bridge")

DETACHED, MUON = ("model.mtp_detach_heads=True",), ("optimizer.optimizer=muon",)
# What a setting needs beside it.
BESIDE = {
    "mtp_clip_grad": DETACHED,
    "mtp_grad_norm_skip_threshold": DETACHED,
    "muon_split_glu": (*MUON, "model.gated_linear_unit=True"),
    "muon_split_qkv_per_head": MUON,
    "muon_split_gdn": MUON,
}
VALUES = {"grad_norm_group": ["mlp=[.]mlp[.]:1"], "mtp_min_lr": 1e-3}  # where an example does not fit the model
REFUSALS = {"muon_split_gdn": "(OptimizerConfig.muon_split_gdn) has nothing to split: the model has no GatedDeltaNet"}
SHORT = ("checkpoint.save=null", "checkpoint.load=null", "validation.eval_iters=0")


@pytest.mark.real_process("in the others all patches are in force")
def test_the_repairs_alone_train_as_all_patches_do_without_their_settings(tmp_path):
    """Two layers and a head have an auxiliary loss of 1 each. Megatron counts each pass of the head."""
    settings = (*EXPERTS, "model.mtp_num_layers=2", "model.mtp_use_repeated_layer=True", *SHORT)
    code, repaired = run_interpreter("repairs", *words(tmp_path, 2, settings))
    assert code == 0, repaired[-6000:]
    _, patched = pretrain(tmp_path, 2, *settings)
    pattern = r" (lm loss|mtp_1 loss|load_balancing_loss|grad norm): (\S+)"
    numbers = re.findall(pattern, repaired)
    assert numbers == re.findall(pattern, patched) and len(numbers) == 2 * 4
    assert float(dict(numbers)["load_balancing_loss"]) == pytest.approx(1.0)
    assert " acceptance %: " in patched and " acceptance %: " not in repaired


@pytest.mark.parametrize("edit", SETTINGS, ids=lambda edit: edit.field)
def test_each_setting_alone_trains_or_is_refused_by_name(edit, tmp_path):
    value = VALUES.get(edit.field, choose_value(edit))
    group = "optimizer" if edit.target == OPTIMIZER_CONFIG else "model"
    settings = (f"{group}.{edit.field}={value!r}", *BESIDE.get(edit.field, ()), *SHORT)
    if edit.field in REFUSALS:
        (ended,) = run_ranks(1, partial(run_command, "all", *words(tmp_path, 1, settings)))
        assert ended.code == 1 and REFUSALS[edit.field] in ended.output
    else:
        assert list(pretrain(tmp_path, 1, *settings)[0]) == [1]


def test_a_limit_for_heads_without_a_separate_norm_is_refused_by_its_name(tmp_path):
    settings = ("optimizer.mtp_clip_grad=0.05", *SHORT)
    (ended,) = run_ranks(1, partial(run_command, "all", *words(tmp_path, 1, settings)))
    assert ended.code == 1 and "(OptimizerConfig.mtp_clip_grad) needs MTP heads with a separate norm" in ended.output
