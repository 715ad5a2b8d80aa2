"""The counts of what `doctor` names in many runs."""

from types import SimpleNamespace

import pytest

from scripts import alarms

pytestmark = pytest.mark.forked("python")


def test_runs_and_findings_are_counted_by_severity():
    severe, light = SimpleNamespace(id="ML-1", severity=4), SimpleNamespace(id="ML-2", severity=1)
    row = alarms.count([[severe, light], [severe], [light], [], None])
    assert row["read"] == 4 and row["not read"] == 1 and row["without severe"] == 2
    assert row["severe"] == {"ML-1": 2}
    assert alarms.make_table({"some": row}).splitlines()[-1] == (
        "| some | 4 | 1 | 2 | 0.00 / 0.50 / 0.00 / 0.00 / 0.50 | ML-1 (2) |"
    )


def test_a_file_that_has_no_run_counts_as_not_read(tmp_path):
    (tmp_path / "a.yaml").write_text("layers: 1")
    (tmp_path / "b.yaml").write_text("model: {num_layers: 1}")
    assert list(alarms.find_in_files([tmp_path / "a.yaml"], None)) == [None]
    (found,) = alarms.find_in_files([tmp_path / "b.yaml"], None)
    assert found is not None
