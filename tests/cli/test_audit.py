"""`audit` lists the known defects of a Megatron from its sources."""

import json
import re

import pytest
from megatron_mtp_patches.cli import audit
from megatron_mtp_patches.defects.catalog import known_defects, releases_with
from megatron_mtp_patches.defects.probe import has_defect

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def ids(release):
    """The defects that the table has for the installed release, without those that its wheel cannot show."""
    return {one.id for one in known_defects() if release in releases_with(one) and has_defect(one) is not None}


def test_the_installed_megatron(command, ids):
    done = command("audit", "--json")
    content = json.loads(done.out)
    assert {row["id"] for row in content["defects"]} == ids and done.code == 0
    severities = [row["severity"] for row in content["defects"]]
    assert severities == sorted(severities, reverse=True)
    assert all(row["file"].endswith(".py") and row["line"] >= 1 for row in content["defects"])


def test_the_list_names_each_and_cuts_no_id_and_no_flag_on_a_narrow_terminal(command, ids, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = json.loads(command("audit", "--json").out)["defects"]
    out = command("audit").out
    lines = [line.rstrip() for line in out.splitlines()]
    assert f"{len(ids)} known defects; the patches remove" in " ".join(lines)
    assert {line.split()[1] for line in lines if line.startswith("* ")} == {f"{one}," for one in ids}
    words = {word.strip("`,;.()") for word in out.split()}
    for row in rows:
        flags = re.findall(r"(?<![\w-])--[\w-]+", f"{row['when']} {row['only_if']} {row['instead']} {row['flag']}")
        assert {*flags, *filter(None, [row["patch"]])} <= words, row["id"]
    assert "…" not in out


def test_sarif(command, ids):
    (run,) = json.loads(command("audit", "--sarif").out)["runs"]
    assert (
        {result["ruleId"] for result in run["results"]}
        == {rule["id"] for rule in run["tool"]["driver"]["rules"]}
        == ids
    )
    assert {result["level"] for result in run["results"]} <= {"error", "warning", "note"}


def test_fail_on(command, monkeypatch):
    mild = [defect for defect in known_defects() if defect.severity < 3]
    monkeypatch.setattr(audit, "known_defects", lambda: mild)
    assert command("audit", "--fail-on", "2").code == 1
    assert command("audit", "--fail-on", "3").code == command("audit").code == 0


def test_a_checkout_that_lacks_the_wrong_line_does_not_have_the_defect(command, tmp_path):
    """A Megatron of one module, in which only the pieces of one defect are found or not."""
    core = tmp_path / "megatron" / "core"
    (core / "tensor_parallel").mkdir(parents=True)
    for folder in (core, core / "tensor_parallel"):
        (folder / "__init__.py").touch()
    layers = core / "tensor_parallel" / "layers.py"
    layers.write_text("def param_is_not_tensor_parallel_duplicate(param, tp_group=None):\n    return True\n")
    assert [row["id"] for row in read(command, tmp_path)["defects"]] == ["ML-5916b"]
    layers.write_text("def param_is_not_tensor_parallel_duplicate(param, expert_tp_group=None):\n    return True\n")
    content = read(command, tmp_path)
    assert content["defects"] == [] and "EO-238" in content["hidden"]


def read(command, folder):
    return json.loads(command("audit", "--against", str(folder), "--json").out)


def test_a_folder_that_is_missing_or_has_no_megatron(command, tmp_path):
    both = f"{tmp_path}:{tmp_path / 'no'}"
    for against, problem in ((tmp_path, "no megatron/core in it"), (both, f"no folder '{tmp_path / 'no'}'")):
        done = command("audit", "--against", str(against))
        assert done.code == 2 and f"--against {against}: there is {problem}" in done.err
