"""verl's SFT trainer trains without any one of the patches, and refuses the settings of that one."""

import os
from functools import partial

import pytest
from megatron_mtp_patches.doctor.places import VERL_SFT

from tests.end_to_end.conftest import run_command
from tests.pages import read_by_bash, shown
from tests.warm.processes import run_ranks

from ..left_out import is_megatrons_own, leave_out, says_why

pytestmark = pytest.mark.forked("torch")  # the patches come before verl


@pytest.fixture
def train(save_model, tmp_path):
    """train(patches, *words): how the rehearsal of the page ended, after one step and without settings of patches."""
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # it would start a thread, with which no fork is safe
    model = save_model(1)
    (_, _, _), (_, _, data), (_, *shown_words) = read_by_bash(shown("verl-rehearsal"), tmp_path)
    kept = [word for word in shown_words if "mtp_detach" not in word and "override_optimizer_config" not in word]

    def enter(patches, *words):
        os.environ |= {"TENSORBOARD_DIR": "events", "HF_HUB_OFFLINE": "1"}
        os.chdir(tmp_path)
        exec(data)
        run_command(patches, *kept, f"model.path={model}", "trainer.total_training_steps=1", *words)

    def run(patches, *words):
        (ended,) = run_ranks(1, partial(enter, patches, *words))
        return ended

    return run


@pytest.mark.parametrize("patch, setting", leave_out(VERL_SFT, "verl", "Megatron-Bridge"))
def test_a_patch_may_be_left_out_with_its_settings(train, patch, setting):
    ended = train(f"-{patch}")
    assert ended.code == 0, ended.output[-3000:]
    if setting and not is_megatrons_own(setting):
        home = VERL_SFT.home_of(setting)
        ended = train(f"-{patch}", f"+{home}.{setting}=1")
        assert ended.code == 1 and says_why(ended.output, patch, setting), ended.output[-3000:]


def test_the_repairs_train_alone(train):
    ended = train("repairs")
    assert ended.code == 0 and "profile=repairs" in ended.output, ended.output[-3000:]
