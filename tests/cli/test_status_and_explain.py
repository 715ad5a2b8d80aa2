"""`status` and `explain`, which import the installed Megatron."""

from __future__ import annotations

import json

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.source import find_file

IDS = [patch.id for patch in CATALOG]


@pytest.fixture(scope="module")
def outputs(run_all):
    """(exit code, output) of each command, the patch set complete."""
    argvs = {"status": ["status"], "json": ["status", "--json"], **{id: ["explain", id] for id in IDS}}
    return dict(zip(argvs, run_all(*argvs.values()), strict=True))


@pytest.fixture
def report(outputs):
    return json.loads(outputs["json"][1])


def test_all_is_well_is_0(outputs):
    assert {name: code for name, (code, _) in outputs.items()} == dict.fromkeys(outputs, 0)


def test_json_has_every_patch_with_its_state_and_targets(report, release):
    assert report["version"] == megatron_mtp_patches.__version__
    assert f"megatron-core like {release}" in report["megatron"]
    assert report["not_imported"] == {}
    assert [patch["id"] for patch in report["patches"]] == IDS
    for told, patch in zip(report["patches"], CATALOG, strict=True):
        optional = patch.optional and not find_file(patch.modules[0])
        assert told["state"] in (["pending"] if optional else ["applied", "repaired", "native"])
        assert list(told["targets"]) == list(dict.fromkeys(edit.target for edit in patch.edits))
        assert told["upstream"] == [str(change) for change in patch.upstream]
        assert told["summary"] in patch.doc and told["reason"]


def test_the_table_says_the_same_as_json(outputs, report):
    lines = outputs["status"][1].splitlines()
    assert megatron_mtp_patches.__version__ in lines[0] and report["megatron"] in lines[0]
    for patch in report["patches"]:
        line = next(line for line in lines if patch["id"] in line)
        cells = [cell.strip() for cell in line.strip("│┃| ").split("│")]
        states = list(patch["targets"].values())
        done = f"{states.count('applied')} of {len(states) - states.count('not in this Megatron')}"
        assert cells[:4] == [
            patch["id"],
            patch["state"],
            " ".join(patch["upstream"]),
            "-" if patch["state"] == "native" else done,
        ]
        assert f"{patch['id']}: {patch['reason']}" in lines


@pytest.mark.parametrize("patch", CATALOG, ids=IDS)
def test_explain_shows_header_links_state_and_edits(outputs, report, release, patch):
    text = outputs[patch.id][1]
    told = report["patches"][IDS.index(patch.id)]
    assert patch.doc.strip() in text
    assert f"{told['state']}: {told['reason']}" in text
    for change in patch.upstream:
        assert f"{change.url}  {change.fate}\n" in text
    for edit in patch.edits:
        rows = [line for line in text.splitlines() if edit.target in line and type(edit).__name__ in line]
        assert rows and all(told["targets"][edit.target] in row for row in rows)
    assert "unknown" not in text and release in text


def test_a_refused_patch_is_a_line_and_1(run_all, tmp_path):
    """A Megatron in which every target is missing: nothing of it can be imported, nothing raises."""
    for module in dict.fromkeys(module for patch in CATALOG for module in patch.modules):
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import no_such_part\n")
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir() and path.name != "megatron"]:
        (folder / "__init__.py").write_text("")
    table, as_json, explained = run_all(["status"], ["status", "--json"], ["explain", IDS[0]], first=tmp_path)
    assert (table[0], as_json[0], explained[0]) == (1, 1, 1)
    report = json.loads(as_json[1])
    assert {patch["state"] for patch in report["patches"]} == {"refused"}
    assert set(report["not_imported"].values()) == {"ModuleNotFoundError: No module named 'no_such_part'"}
    assert table[1].count("refused") >= len(IDS)
    assert "could not import megatron.core" in table[1] and "missing" in explained[1]
