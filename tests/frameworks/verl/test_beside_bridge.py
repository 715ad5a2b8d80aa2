"""`doctor --batch` and `reproduce` beside Megatron-Bridge, which changes Megatron as soon as it is imported."""

import json

import pytest
from megatron_mtp_patches.cli import main

from tests.cli.training_flags import EXPERTS

pytestmark = pytest.mark.forked("python")


def test_the_patches_are_those_that_a_script_chooses(capsys, tmp_path):
    removed = "removed by count-experts-in-grad-norm"
    for choice, code in (("all", 0), ("none", 1)):
        (tmp_path / "run.sh").write_text(f"export MEGATRON_MTP_PATCHES={choice}\ntrain.py {EXPERTS}\n")
        assert main(["doctor", "--te", "2.16.1", "--batch", str(tmp_path / "run.sh")]) == code
        assert (removed in capsys.readouterr().out) is (choice == "all")


def test_a_defect_is_shown_with_megatron_as_it_is_and_with_the_patches(capsys):
    """Full recomputation of heads: Bridge repairs it, too, where it is imported."""
    assert main(["reproduce", "ML-3457", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["with the patches"]["right"] and not report["as it is"]["right"]
