"""`status`, which applies the patches to the installed Megatron."""

import json
import re
from importlib.util import find_spec

import megatron_mtp_patches
import pytest
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, MultiTokenPredictionLayer
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli import status
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.defects.probe import has_defect
from megatron_mtp_patches.megatrons.origins import origin_of, retired_in

from tests.conformance.expected import is_here
from tests.pages import ROOT

from .fresh_start import run_python

pytestmark = pytest.mark.forked("megatron")

IDS = [patch.id for patch in CATALOG]


@pytest.fixture
def report(command):
    done = command("status", "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_status_as_json_has_every_patch_with_its_state_and_targets(report, release):
    assert report["version"] == megatron_mtp_patches.__version__
    assert f"megatron-core {release} (by its sources)" in report["megatron"]
    assert report["not_imported"] == {}
    assert [patch["id"] for patch in report["patches"]] == IDS
    for told, patch in zip(report["patches"], CATALOG, strict=True):
        assert told["state"] in (["applied", "repaired", "native"] if is_here(patch) else ["pending"])
        assert list(told["targets"]) == list(dict.fromkeys(edit.target for edit in patch.edits))
        assert told["upstream"] == [str(change) for change in patch.upstream]
        assert told["summary"] == patch.summary and told["reason"]
        assert (told["origin"], told["retired_in"]) == (str(origin_of(patch)), retired_in(patch))
        assert told["whose"] and told["retire_when"]
        severities = [one.severity for one in known_defects() if one.patch == patch.id and has_defect(one)]
        assert told["severity"] == (max(severities) if severities else None)


def test_the_page_of_commands_has_the_keys_of_json(report):
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("\n## The state as JSON\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == report["patches"][0].keys()
    assert {*report} == set(re.findall(r"`(\w+)`", section.partition("\n|")[0]))


@pytest.mark.real_process("Megatron is imported without the rehearsal that the tests' processes have")
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="TransformerEngine is not installed")
def test_beside_transformer_engine_without_its_kernels_megatron_is_imported_in_a_rehearsal():
    done = run_python("-m", "megatron_mtp_patches", "status")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TransformerEngine has no kernels here: this is the state in a rehearsal" in done.stdout
    assert "could not import" not in done.stdout


@pytest.mark.parametrize("words", [["status"], ["status", "--json"]], ids=" ".join)
def test_a_target_that_another_library_has_overwritten_is_named_and_ends_with_1(command, monkeypatch, words):
    """As mcore-bridge does when it is imported."""
    import_targets = status.import_targets

    def import_another_library():
        monkeypatch.setattr(MultiTokenPredictionBlock, "forward", lambda self, hidden_states: hidden_states)
        return import_targets()

    monkeypatch.setattr(status, "import_targets", import_another_library)
    done = command(*words)
    target = f"{MultiTokenPredictionBlock.__module__}:MultiTokenPredictionBlock.forward"
    assert done.code == 1
    if "--json" in words:
        states = {patch["targets"].get(target) for patch in json.loads(done.out)["patches"]}
        assert states == {None, "applied, then changed by another library"}
    else:
        assert f"{target} was changed by {__name__} after the patches\n" in done.out
    monkeypatch.undo()
    assert command("status").code == 0


@pytest.mark.parametrize("library, code", [("megatron.bridge.models.gpt_provider", 0), ("another", 1)])
def test_what_a_framework_is_known_to_overwrite_is_said_to_be_expected(command, monkeypatch, library, code):
    """As Megatron-Bridge 0.5.1 does; one patch changes nothing but this method."""

    def replacement(self, *args):
        return args

    replacement.__module__ = library
    import_targets = status.import_targets

    def import_bridge():
        monkeypatch.setattr(MultiTokenPredictionLayer, "_checkpointed_forward", replacement)
        return import_targets()

    (report,) = [one for one in megatron_mtp_patches.status() if one.id == "recompute-quantized-mtp-heads"]
    if report.state != "applied":
        pytest.skip("no patch changes nothing but this method in this release")
    monkeypatch.setattr(status, "import_targets", import_bridge)
    done = command("status")
    assert done.code == code and f"was changed by {library} after the patches" in done.out
    assert ("(expected under" in done.out) is (code == 0)
    assert re.search(r"recompute-quantized-mtp-heads +│ overwritten +│.*│ 0 of 1", done.out)


def test_the_table_of_status_says_the_same_as_json(command, report):
    done = command("status")
    assert done.code == 0
    lines = done.out.splitlines()
    assert megatron_mtp_patches.__version__ in lines[0] and report["megatron"] in lines[0]
    for patch in report["patches"]:
        line = next(line for line in lines if patch["id"] in line)
        cells = [cell.strip() for cell in line.strip("│┃| ").split("│")]
        states = list(patch["targets"].values())
        done = f"{states.count('applied')} of {len(states) - states.count('absent here')}"
        assert cells[:4] == [
            patch["id"],
            patch["state"],
            " ".join(patch["upstream"]),
            "-" if patch["state"] == "native" else done,
        ]
        is_told = [line.endswith(f"({patch['state']}): {patch['reason']}") and patch["id"] in line for line in lines]
        assert any(is_told) is (patch["state"] not in ("applied", "repaired", "native"))


def test_patches_that_are_left_out_share_a_line(command, monkeypatch):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "-detach-mtp-heads,-floor-clip-coefficient")
    megatron_mtp_patches.revert()
    assert (
        "detach-mtp-heads, floor-clip-coefficient (disabled): left out by MEGATRON_MTP_PATCHES"
        in command("status").out.splitlines()
    )


def test_patches_that_the_profile_leaves_out_share_a_line_that_says_how_to_add_one(command, monkeypatch):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "repairs")
    megatron_mtp_patches.revert()
    lines = [line for line in command("status").out.splitlines() if "(disabled)" in line]
    assert len(lines) == 1 and "floor-clip-coefficient" in lines[0]
    assert lines[0].endswith("=repairs; write repairs,ID to add it to the repairs")


@pytest.mark.parametrize("release, row", [("0.17.1", None), ("0.18.2", "Drop it.")])
def test_what_an_upgrade_makes_superfluous(command, release, row):
    """keep-outputs-until-sent is upstream's since 0.18.0; nothing has floor-clip-coefficient."""
    rows = [line.split("│")[1:] for line in command("status", "--retired-by", release).out.splitlines() if "│" in line]
    advice = {columns[1].strip(): columns[3].strip() for columns in rows}
    assert advice.get("keep-outputs-until-sent") == row and "floor-clip-coefficient" not in advice
    repaired = advice.get("skip-update-on-large-grad-norm", "")
    assert repaired.startswith("Keep it for its repairs.") is (row is not None)


def test_what_an_upgrade_newly_makes_superfluous_is_named(command, release):
    """scale-mtp-loss-separately is upstream's from 0.19 on, keep-outputs-until-sent from 0.18.

    derive-mtp-labels, which 0.19 has too, stays for its repairs.
    """
    out = command("status", "--retired-by", "0.19.2").out
    since = {cells[2].strip(): cells[1].strip() for line in out.splitlines() if len(cells := line.split("│")) > 2}
    assert (since["derive-mtp-labels"], since["keep-outputs-until-sent"]) == ("0.19.2", "0.18.2")
    new = out.splitlines()[-1]
    assert new.startswith(f"superfluous there and not yet in {release}, which is installed here: ")
    assert ("scale-mtp-loss-separately" in new) is (release != "0.19.2")
    assert "derive-mtp-labels" not in new
    assert ("keep-outputs-until-sent" in new) is (release in ("0.16.1", "0.17.1"))
