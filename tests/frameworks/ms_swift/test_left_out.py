"""`megatron sft` trains without any one of the patches, and refuses the arguments of that one."""

import os
from functools import partial

import pytest
from megatron_mtp_patches.catalog import SETTINGS
from megatron_mtp_patches.doctor.places import MS_SWIFT

from tests.conformance.inspection import choose_value
from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from ..left_out import is_megatrons_own, leave_out, says_why
from .conftest import COMMAND
from .save_model import save
from .test_each_setting import words_of

pytestmark = pytest.mark.forked("torch")  # the patches come before mcore-bridge

EDITS = {edit.field: edit for edit in SETTINGS}


@pytest.fixture
def train(shown_commands, tmp_path):
    """train(patches, *words): how the page's training with the repairs ended, after one step and with these patches."""
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # it would start a thread, with which no fork is safe
    (*_, saved), _ = shown_commands["save"]
    save(tmp_path / saved)
    words, _ = shown_commands["repairs"]
    words = words[words.index("sft") :]

    def enter(patches, *more):
        os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.chdir(tmp_path)
        run_command(patches, "run", "--device", "cpu", str(COMMAND), *words, "--train_iters", "1", *more)

    def run(patches, *more):
        (ended,) = run_ranks(1, partial(enter, patches, *more))
        return ended

    return run


@pytest.mark.parametrize("patch, setting", leave_out(MS_SWIFT, "ms-swift", "mcore-bridge"))
def test_a_patch_may_be_left_out_with_its_arguments(train, patch, setting):
    ended = train(f"-{patch}")
    assert ended.code == 0, ended.output[-3000:]
    if not is_megatrons_own(setting):
        ended = train(f"-{patch}", f"--{setting}", *words_of(choose_value(EDITS[setting])))
        assert ended.code == 1 and says_why(ended.output, patch, setting), ended.output[-3000:]
