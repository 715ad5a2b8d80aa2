"""Megatron-Bridge's own `pretrain` trains without any one of the patches, and refuses the settings of that one."""

from functools import partial

import pytest
from megatron_mtp_patches.doctor.places import MEGATRON_BRIDGE

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .left_out import is_megatrons_own, leave_out, says_why
from .test_megatron_bridge import set_attributes, words

pytestmark = pytest.mark.forked("torch")  # the patches come before Bridge


@pytest.mark.parametrize("patch, setting", leave_out(MEGATRON_BRIDGE, "Megatron-Bridge"))
def test_a_patch_may_be_left_out_with_its_settings(patch, setting, tmp_path):
    settings = ("checkpoint.save=None", "checkpoint.load=None")
    (ended,) = run_ranks(1, partial(run_command, f"-{patch}", *words(tmp_path, 1, settings)))
    assert ended.code == 0 and " iteration        1/" in ended.output, ended.output[-3000:]
    if setting and not is_megatrons_own(setting):
        attribute = (MEGATRON_BRIDGE.home_of(setting), setting)
        (ended,) = run_ranks(1, partial(set_attributes, f"-{patch}", tmp_path, attribute))
        assert ended.code == 1 and says_why(ended.output, patch, setting), ended.output[-3000:]
