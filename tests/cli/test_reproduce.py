"""`reproduce` says what to install where a program needs a package that is not here, and writes issues for upstream."""

import json
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.cli import upstream_report
from megatron_mtp_patches.cli.reproduce import run_both as shown
from megatron_mtp_patches.megatrons.known import MAIN
from megatron_mtp_patches.rehearsal import transformer_engine
from megatron_mtp_patches.reproductions import needs, runner

pytestmark = pytest.mark.forked("megatron")

RIGHT, WRONG = (SimpleNamespace(expected=1, seen=seen, is_right=seen == 1) for seen in (1, 2))


@pytest.fixture
def without_transformer_engine(monkeypatch):
    monkeypatch.setattr(transformer_engine, "has_python", lambda: False)


@pytest.fixture
def outcomes(monkeypatch):
    """outcomes(as it is, with the patches): what each program that runs gives."""

    def give(*pair):
        monkeypatch.setattr(runner, "prepare", lambda: None)
        monkeypatch.setattr(runner, "run", lambda program, patches: pair[patches == "all"])

    return give


def test_a_program_that_needs_transformer_engine_says_what_to_install_and_ends_with_125(
    command, without_transformer_engine
):
    done = command("reproduce", "ML-5916")
    assert done.code == 125
    advice = transformer_engine.installation_advice()
    assert advice.startswith(
        "install its Python in an environment for rehearsals alone: `pip install --no-deps transformer-engine"
    )
    assert f"    cannot run here: it needs transformer-engine>=2.13: {advice}\n" in done.out
    assert "as it is" not in done.out


@pytest.mark.parametrize(
    "defect, needed",
    [
        ("EO-238", "emerging-optimizers: pip install emerging-optimizers"),
        ("ML-5394", "Muon: pip install emerging-optimizers"),
        ("ML-6238", "megatron.training: this Megatron has no trainer; put a checkout of the same release first on "),
    ],
)
def test_a_package_that_is_missing_is_named(command, monkeypatch, defect, needed):
    monkeypatch.setattr(needs, "find_version", lambda distribution, module: None)
    (report,) = json.loads(command("reproduce", defect, "--json").out)
    assert report["cannot run"].startswith(f"it needs {needed}")


@pytest.mark.parametrize(
    "defect, installed, megatron, reason",
    [
        ("ML-5916", "2.12.0", "0.18.2", "transformer-engine>=2.13: 2.12.0 is installed"),
        ("ML-5916", "2.14.0.dev0+5d3c1a2", "0.18.2", None),
        ("ML-5394", "0.2.0", "0.16.1", "Muon: emerging-optimizers 0.2.0 is installed, and there is no Muon: "),
        ("ML-5394", "0.2.0", "0.18.2", None),
        ("EO-238", "0.2.0", "0.16.1", None),
    ],
)
def test_a_version_that_does_not_fit_is_named(monkeypatch, defect, installed, megatron, reason):
    monkeypatch.setattr(needs, "find_version", lambda distribution, module: installed)
    monkeypatch.setattr(needs, "find_releases", lambda: frozenset({megatron}))
    monkeypatch.setattr(needs.transformer_engine, "available", lambda: True)
    missing = needs.find_missing(runner.find_program(defect))
    assert missing.startswith(f"it needs {reason}") if reason else missing == ""


@pytest.mark.parametrize("patched, code", [(RIGHT, 125), (WRONG, 1)], ids=["removed", "left"])
def test_of_all_programs_those_that_can_run_do(command, without_transformer_engine, outcomes, patched, code):
    outcomes(WRONG, patched)
    done = command("reproduce", "--all", "--json")
    reports = json.loads(done.out)
    ran = {report["id"] for report in reports if not report["cannot run"]}
    assert done.code == code
    assert "ML-5338" in ran and not ran & {"ML-5916", "ML-4070", "fsdp-repeated-head"}


def test_a_program_that_needs_nothing_more_runs(command, without_transformer_engine, outcomes):
    outcomes(WRONG, RIGHT)
    assert command("reproduce", "ML-5338").code == 0


def test_an_id_that_resembles_that_of_a_known_defect_is_asked_about(command):
    done = command("reproduce", "ml-5077")
    assert done.code == 2
    assert "'ml-5077' is not the id of a known defect (did you mean ML-5077?); `megatron-mtp-patches audit`" in done.err
    assert "(did you mean overlap-padding-mask?)" in command("reproduce", "OVERLAP-PADDING-MASKS").err
    assert "(did you mean" not in command("reproduce", "nothing-like-it").err


def test_a_report_of_a_defect_that_nobody_has_reported_has_all_that_upstream_needs(
    command, outcomes, tmp_path, release
):
    outcomes(WRONG, RIGHT)
    done = command("reproduce", "qk-clip-heads", "--report")
    assert done.code == 0 and "Run it before you post it" in done.err
    assert done.out.startswith("# [BUG] QK clipping leaves out the attention of MTP layers")
    said, _, script = done.out.partition("```python\n")
    for part in (
        "`megatron/core/optimizer/qk_clip.py` (`clip_qk`)",
        "`--qk-clip` with `--mtp-num-layers`",
        f"{release}, ",
        f"main ({MAIN})",
        "expected        1\nseen            2\nwith the patch  1\n",
        f"megatron-core {release} and torch ",
        "Background, about this and related defects: `--qk-clip` (MuonClip) visits",
        "and in an MTP head. The right result is 1.\n",
        "removes it, `clip-qk-of-all-layers`: Let `--qk-clip` reach every attention layer",
        "No setting avoids it.",
    ):
        assert part in said
    assert said.count("QK clipping leaves out the attention of MTP layers") == 1, "the title, which nothing repeats"
    file = tmp_path / "repro.py"
    command("reproduce", "qk-clip-heads", "--standalone", str(file))
    assert script == f"{file.read_text(encoding='utf-8')}```\n\n</details>\n"


def test_a_report_of_a_reported_defect_says_where_to_post_it(command, outcomes):
    outcomes(WRONG, WRONG)
    done = command("reproduce", "ML-7513", "--report")
    assert done.code == 0 and done.out.startswith(
        "<!-- Already reported: https://github.com/NVIDIA/Megatron-LM/issues/7513, "
    )
    assert "with the patch" not in done.out and "megatron-mtp-patches has a patch" not in done.out
    assert "Until it is fixed: add `--calculate-per-token-loss`" in done.out


@pytest.mark.parametrize("defect", ["transposed-router-gradients", "ML-7338"])
def test_a_report_that_rests_on_a_stand_in_says_so_first(command, monkeypatch, outcomes, defect):
    outcomes(WRONG, RIGHT)
    monkeypatch.setattr(upstream_report, "run_both", lambda *words: shown(*words) | {"has defect": True})
    monkeypatch.setattr(needs, "find_missing", lambda program: "")
    assumed = runner.find_program(defect).ASSUMES
    done = command("reproduce", defect, "--report")
    comment, _, rest = done.out.partition(" -->\n")
    assert comment.startswith(f"<!-- What the script has shown here follows from an assumption: {assumed}. ")
    assert comment.endswith("Show the defect with the real kernel before you post this.")
    assert f"with the real kernel: it assumes that {assumed}." in " ".join(rest.split())


def test_the_id_of_a_patch_leads_to_the_defects_that_a_program_shows(command):
    done = command("reproduce", "keep-gradients-of-tied-embeddings")
    assert done.code == 2 and "is a patch; give the id of a defect that it removes: fsdp-tied-embeddings, " in done.err
    assert "is a patch; no program shows its work" in command("reproduce", "add-settings-to-ms-swift").err


def test_there_is_no_report_where_the_defect_does_not_show(command, outcomes, without_transformer_engine):
    outcomes(RIGHT, RIGHT)
    done = command("reproduce", "qk-clip-heads", "--report")
    assert (done.code, done.out) == (1, "") and "does not show qk-clip-heads; these have it: 0.16.1, " in done.err
    done = command("reproduce", "ML-5916", "--report")
    assert (done.code, done.out) == (125, "") and "it needs transformer-engine>=2.13: install" in done.err
