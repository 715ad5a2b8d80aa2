"""Megatron-Bridge's own `pretrain` trains without any one of the patches, and refuses the settings of that one."""

from functools import partial

import pytest
from megatron_mtp_patches.doctor.places import MEGATRON_BRIDGE

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .left_out import describe, is_megatrons_own, leave_out
from .test_megatron_bridge import WAYS, set_idle, words

pytestmark = pytest.mark.forked("torch")  # the patches come before Bridge


@pytest.mark.parametrize("patch, setting", leave_out(MEGATRON_BRIDGE, "Megatron-Bridge"))
def test_a_patch_may_be_left_out_with_its_settings(patch, setting, tmp_path):
    settings = ("checkpoint.save=null", "checkpoint.load=null")
    (ended,) = run_ranks(1, partial(run_command, f"-{patch}", *words(tmp_path, 1, settings)))
    assert ended.code == 0 and " iteration        1/" in ended.output, ended.output[-3000:]
    if setting and not is_megatrons_own(setting):
        path = f"{MEGATRON_BRIDGE.home_of(setting)}.{setting}"
        (ended,) = run_ranks(1, partial(set_idle, f"-{patch}", tmp_path, path))
        # A field that is there is refused when its value is given as an override, and when the run begins.
        ways = WAYS - (patch in MEGATRON_BRIDGE.carriers.get(setting, ()))
        assert ended.code == 1 and ended.output.count(describe(patch, setting)) == ways, ended.output[-3000:]
