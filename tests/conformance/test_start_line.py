"""A training of Megatron-LM's trainer begins with a line on the known defects that affect it or are removed from it."""

from types import SimpleNamespace

import pytest
from megatron_mtp_patches.doctor import start_line
from megatron_mtp_patches.doctor.flags import read
from megatron_mtp_patches.doctor.start_line import describe

pytestmark = pytest.mark.forked("patched")


def test_nothing_is_said_where_nothing_is_left():
    assert describe(SimpleNamespace(num_layers=2)) == ""


def test_defects_that_no_patch_removes_are_counted_and_the_most_severe_named(monkeypatch):
    findings = [SimpleNamespace(id=f"ML-{n}", severity=5 - n // 3, is_removed=n == 1, patch="a") for n in range(8)]
    monkeypatch.setattr(start_line, "diagnose_sources", lambda sources, version: findings)
    line = start_line.describe(None)
    assert "7 known defects affect this run (severity up to 5 of 5: ML-0, ML-2, ML-3, ML-4, ML-5, ...)" in line


def test_the_patches_that_remove_a_defect_from_this_run_are_named(monkeypatch):
    patches = ["b", "b", "a", None]
    findings = [SimpleNamespace(id="x", severity=2, is_removed=patch is not None, patch=patch) for patch in patches]
    monkeypatch.setattr(start_line, "diagnose_sources", lambda sources, version: findings)
    assert "3 known defects are removed from this run (by b, a); 1 known defect affects" in start_line.describe(None)
    findings.pop()
    assert start_line.describe(None) == "3 known defects are removed from this run (by b, a)"


@pytest.mark.parametrize(
    "variables, said", [({}, True), ({"RANK": "1"}, False), ({"MEGATRON_MTP_PATCHES_DEFECTS": "off"}, False)]
)
def test_rank_0_says_it_unless_it_is_told_not_to(monkeypatch, caplog, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start_line, "describe", lambda arguments: "2 known defects affect this run")
    assert start_line.log_known_defects(Arguments()) == "validated"
    assert ("2 known defects" in caplog.text) is said


def test_a_training_goes_on_where_a_defect_cannot_be_looked_for(monkeypatch, caplog):
    def fail(arguments):
        raise KeyError("layout")

    monkeypatch.setattr(start_line, "describe", fail)
    assert start_line.log_known_defects(Arguments()) == "validated"
    assert "known defects were not looked for: KeyError: 'layout'" in caplog.text


def test_megatron_s_trainer_says_it(monkeypatch, caplog):
    pytest.importorskip("megatron.training.arguments", reason="the wheel of 0.16.1 has no trainer")
    monkeypatch.setattr(start_line, "describe", lambda arguments: f"{arguments.num_layers} known defects")
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8"
    read(f"{flags} --micro-batch-size 1".split(), None)
    assert "4 known defects" in caplog.text


class Arguments(dict):
    """A call of validate_args."""

    def __init__(self):
        super().__init__(args=SimpleNamespace())

    def proceed(self):
        return "validated"
