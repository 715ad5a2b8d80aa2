"""`doctor --batch` beside Megatron-Bridge, which changes Megatron as soon as it is imported."""

import pytest

from tests.cli.training_flags import EXPERTS

pytestmark = pytest.mark.forked("python")


def test_the_patches_are_those_that_a_script_chooses(capsys, tmp_path):
    from megatron_mtp_patches.cli import main

    removed = "removed by count-experts-in-grad-norm"
    for choice, code in (("all", 0), ("none", 1)):
        (tmp_path / "run.sh").write_text(f"export MEGATRON_MTP_PATCHES={choice}\ntrain.py {EXPERTS}\n")
        assert main(["doctor", "--te", "2.16.1", "--batch", str(tmp_path / "run.sh")]) == code
        assert (removed in capsys.readouterr().out) is (choice == "all")
