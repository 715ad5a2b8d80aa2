"""`status` and `explain` where every target is missing: nothing of Megatron can be imported, and nothing raises."""

import json

import pytest
from megatron_mtp_patches.catalog import CATALOG

pytestmark = pytest.mark.forked("python")


@pytest.fixture
def broken_megatron(tmp_path):
    for module in dict.fromkeys(module for patch in CATALOG for module in patch.modules):
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import no_such_part\n")
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir() and path != tmp_path / "megatron"]:
        (folder / "__init__.py").write_text("")
    return tmp_path


def test_status_json_reports_every_patch_as_refused_and_exits_with_1(forked_command, broken_megatron):
    done = forked_command("status", "--json", first=[broken_megatron])
    assert done.code == 1
    report = json.loads(done.output)
    states = {patch["id"]: patch["state"] for patch in report["patches"]}
    # Some known Megatron lacks each target of these.
    for lacking in ("sum-fsdp-gradients-in-fp32", "mask-prompts-of-identity-format"):
        assert states.pop(lacking) == "pending"
    assert set(states.values()) == {"refused"}
    assert set(report["not_imported"].values()) == {"ModuleNotFoundError: No module named 'no_such_part'"}


def test_the_table_of_status_has_a_line_for_each_and_the_reason_once(forked_command, broken_megatron):
    done = forked_command("status", first=[broken_megatron])
    assert done.code == 1
    assert done.output.count("refused") >= len(CATALOG)
    lines = done.output.splitlines()
    (line,) = (line for line in lines if line.startswith("could not import "))
    assert lines.index(line) < min(lines.index(one) for one in lines if " (refused): " in one)
    assert "megatron.core.optimizer" in line and "No module named 'no_such_part'" in line


def test_explain_says_what_is_missing_and_exits_with_1(forked_command, broken_megatron):
    done = forked_command("explain", CATALOG[0].id, first=[broken_megatron])
    assert done.code == 1 and "missing" in done.output
