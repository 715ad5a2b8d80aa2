"""The commands of README and docs/ run as they stand, with two exceptions.

The demo's script takes the place of upstream's pretrain_gpt.py, which is in no wheel, and the demo's data that of
`--mock-data`, for which Megatron compiles a helper in a checkout.
"""

import json
import re
from functools import partial
from importlib.metadata import version

import pytest

from tests.pages import answer, blocks, read_by_bash, shown
from tests.warm.processes import run_ranks

from .conftest import HAS_TRAINER, run_command

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.skipif(not HAS_TRAINER, reason="the 0.16.1 wheel has no megatron.training"),
]
ARGS = shown("cpu-command").rpartition("megatron-mtp-patches")[0]  # the variable alone


@pytest.fixture
def run(run_shown, dataset):
    """run(text): what each command of a block prints."""
    return lambda text: run_shown(text, {"--mock-data": ["--data-path", str(dataset)]})


def test_the_command_for_a_cpu_trains(run):
    (output,) = run(shown("cpu-command"))
    assert len(re.findall(r" iteration +\d+/ +4 \|.* mtp_2 acceptance %: ", output)) == 4


def test_two_ranks_train(run):
    (output,) = run(ARGS + shown("two-ranks"))
    assert re.search(r" iteration +4/ +4 \|.* mtp grad norm: ", output)


def test_a_rehearsal_saves_and_resumes(run):
    saved, resumed, verified = run(ARGS + shown("save-and-resume"))
    assert [re.findall(r" iteration +(\d+)/ +4 \|", output) for output in (saved, resumed)] == [["1", "2"], ["3", "4"]]
    assert "of the heads and nothing else" in verified


def test_the_first_command_of_readme(run):
    (output,) = run(shown("first-command"))
    defect, _, count = answer("first-command").partition("Known defects")
    assert all(part in " ".join(output.split()) for part in defect.split(" ... "))
    if version("megatron-core").startswith("0.18."):
        assert count in " ".join(output.split())


def test_the_commands_that_check(run):
    status, doctor, verified = run(ARGS + shown("check-commands"))
    assert re.search(r"detach-mtp-heads\W+(applied|repaired)", status)
    assert "known defect" in doctor.lower() and "unknown to Megatron" not in doctor
    check_answer("check-commands", doctor)
    assert re.search(r"the MTP loss has reached \d+ parameters of the heads and nothing else", verified)


def test_the_commands_about_known_defects(run):
    audit, doctor, reproduced = run(ARGS + shown("known-defects"))
    assert re.search(r"\d+ known defects; the patches remove \d+", audit) and "known defect" in doctor.lower()
    assert re.search(r"expected +\S+\n +as it is +\S+\n +with the patches +\S+", reproduced)


def test_the_recipe_for_pretraining(run):
    verified, output = run(ARGS + shown("pretrain-with-mtp-heads"))
    assert "of the heads and nothing else" in verified
    names = (" grad norm: ", " mtp grad norm: ", " mtp_1 acceptance %: ", " mtp acceptance length: ")
    (line,) = re.findall(r" iteration +4/ +4 \|.*", output)
    assert all(name in line for name in names)


def test_doctor_reads_the_flags(run):
    (output,) = run(shown("doctor"))
    assert "known defect" in output.lower() and "unknown to Megatron" not in output
    check_answer("doctor", output)


def check_answer(name, output):
    """What a page shows of an answer, with ` ... ` for what it leaves out, is in that of the release that it names."""
    if version("megatron-core").startswith("0.18."):
        assert all(part in " ".join(output.split()) for part in answer(name).split(" ... "))


def test_detached_heads_are_verified(run):
    (output,) = run(ARGS + shown("verify-detached-heads"))
    assert re.search(r"the MTP loss has reached \d+ parameters of the heads and nothing else", output)


def test_a_frozen_main_model_is_verified(run):
    (output,) = run(ARGS + shown("verify-frozen-main-model"))
    assert re.search(r"has left \d+ tensors of the main model as they were, to the bit", output)


def test_the_command_for_gpus_has_flags_that_megatron_knows(tmp_path):
    text = next(block.text for block in blocks() if "needs 8 GPUs; a test has Megatron read" in block.marker)
    (words,) = read_by_bash(text, tmp_path)
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    (patches,) = re.findall(r"MEGATRON_MTP_PATCHES=(\S+)", text)
    (ended,) = run_ranks(1, partial(run_command, patches, "doctor", "--world-size", "8", "--json", "--", *flags))
    assert ended.code == 0, ended.output
    actual = json.loads(ended.output[ended.output.index("{") :])
    assert (actual["unknown"], actual["world_size"]) == ([], 8)
