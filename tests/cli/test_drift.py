"""`drift`: the installed Megatron, another folder, or a known release. tests/engine shows what a table becomes."""

import os
import shutil

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli import drift
from megatron_mtp_patches.engine.fingerprints import KnownSources
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.megatron_engine import ENGINE
from megatron_mtp_patches.megatrons import installed as installed_megatron
from megatron_mtp_patches.megatrons.known import RELEASES

from tests.conformance.expected import STATE

pytestmark = pytest.mark.forked("python")

PATCHES = [patch for patch in CATALOG if not patch.package]
TARGETS = list(dict.fromkeys(edit.target for patch in PATCHES for edit in patch.edits if edit.check_source))
STEP = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"
FP32_STEP = "megatron.core.optimizer.optimizer:FP32Optimizer.step"


@pytest.fixture(scope="module")
def site(release):
    """The folder that holds the installed megatron."""
    return find_file("megatron.core").parents[2]


@pytest.fixture
def table(monkeypatch, tmp_path_factory):
    """A copy of the table of fingerprints, which the command may write to."""
    file = tmp_path_factory.mktemp("table") / "fingerprints.json"
    shutil.copy(ENGINE.table_file, file)
    monkeypatch.setattr(ENGINE, "table_file", str(file))
    return file


@pytest.fixture
def fork(site, tmp_path):
    """A folder with a Megatron that is its optimizer alone, in which a class has another name."""
    file = tmp_path / "megatron" / "core" / "optimizer" / "optimizer.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (file.parent / "__init__.py").touch()
    source = (site / file.relative_to(tmp_path)).read_text(encoding="utf-8")
    file.write_text(source.replace("class FP32Optimizer", "class FP31Optimizer"), encoding="utf-8")
    return tmp_path


@pytest.fixture
def verl(tmp_path_factory):
    """A folder with a verl that is its worker alone."""
    folder = tmp_path_factory.mktemp("verl")
    workers = folder / "verl" / "workers"
    workers.mkdir(parents=True)
    for package in (folder / "verl", workers):
        (package / "__init__.py").touch()
    worker = "class TrainingWorker:\n    def _postprocess_output(self, output):\n        pass\n"
    (workers / "engine_workers.py").write_text(worker)
    return folder


@pytest.fixture
def sources(rows):
    """sources(output): {target: what stands beside it}"""
    return lambda output: {target: cells[0] for target, cells in rows(output).items() if target in TARGETS}


def test_the_installed_release_has_no_drift(command, rows, sources, release, site):
    done = command("drift")
    assert (done.code, done.err) == (0, "")
    assert f"megatron-core {release} (by its sources)" in done.out and str(site) in done.out.splitlines()[0]
    assert "unknown targets: 0" in done.out
    assert list(sources(done.out)) == TARGETS
    assert all(release in text for text in sources(done.out).values())
    shown = rows(done.out)
    assert [shown[patch.id] for patch in PATCHES] == [[STATE[patch.id]] for patch in PATCHES]


def test_a_megatron_of_no_known_release_is_called_nearest_to_one(command, release, monkeypatch):
    monkeypatch.setattr(installed_megatron, "fingerprint", lambda edit: "of a fork")
    assert f"megatron-core nearest to {release} (some of its sources" in command("drift").out.splitlines()[0]


def test_a_folder_is_read_instead_of_the_installed_megatron(command, rows, sources, site, fork):
    same = command("drift", "--against", str(site))
    assert same.code == 0 and str(site) in same.out.splitlines()[0]
    assert rows(same.out) == rows(command("drift").out)
    changed = command("drift", "--against", str(fork))
    assert changed.code == 1 and rows(changed.out)["exempt-muon-from-clipping"] == ["refused"]
    listed = sources(changed.out)
    assert listed[STEP] == sources(same.out)[STEP] and "no known release" in listed[FP32_STEP]
    unknown = sum("no known release" in text for text in listed.values())
    assert unknown >= 2 and f"unknown targets: {unknown}" in changed.out


@pytest.mark.parametrize("against", RELEASES)
def test_against_a_release_shows_what_has_changed_since_or_before(command, sources, release, against):
    done = command("drift", "--against", against)
    differing = [target for target, text in sources(done.out).items() if against not in text]
    assert done.code == (0 if against == release else 1)
    assert bool(differing) == (against != release)
    assert f"targets that differ from {against}: {len(differing)}" in done.out
    assert f"whose source here is not that of {against}, with the releases that have" in done.out


def test_since_compares_a_folder_as_it_does_the_installed_megatron(command, site):
    installed = command("drift", "--against", RELEASES[0])
    folder = command("drift", "--against", str(site), "--since", RELEASES[0])
    assert folder.code == installed.code
    assert folder.out.splitlines() == [str(site), *installed.out.splitlines()[1:]]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--since 1.2.3", f"--since '1.2.3': the releases are {RELEASES[0]}, "),
        ("--against 0.18.2 --since 0.17.1", "--since goes with a folder"),
        ("--against 1.2.3", "'1.2.3' is neither a folder with megatron/core or another package in it that is patched"),
        ("--accept 99.0 --against 0.18.2", "--against FOLDER --accept RELEASE"),
        (f"--against {{fork}} --only {STEP}", "--only TARGET goes with --accept NAME"),
        (f"--against {{fork}} --accept ours --only {STEP}s", "--only TARGET goes with --accept NAME"),
        ("--against {verl} --accept 0.9.2", "--accept '0.9.2': "),
    ],
)
def test_wrong_usage_changes_nothing(command, table, fork, verl, words, said):
    before = table.read_bytes()
    done = command("drift", *words.format(fork=fork, verl=verl).split())
    assert (done.code, done.out) == (2, "") and said in done.err
    assert table.read_bytes() == before


@pytest.mark.parametrize("words", [["drift"], ["drift", "--against", "0.18.2"]], ids=" ".join)
def test_without_a_megatron_there_is_nothing_to_compare(command, monkeypatch, words):
    for module in (drift, installed_megatron):
        monkeypatch.setattr(module, "find_file", lambda name: None)
    done = command(*words)
    assert done.code == 1
    assert "megatron-core is not installed" in done.err


def test_accept_makes_the_sources_of_a_folder_known_as_a_release(command, sources, fork, table):
    unknown = command("drift", "--against", str(fork))
    accepted = command("drift", "--against", str(fork), "--accept", "99.0")
    assert (unknown.code, accepted.code, accepted.err) == (1, 0, "")
    new = sorted(target for target, text in sources(unknown.out).items() if "no known release" in text)
    assert accepted.out.splitlines()[: len(new) + 3] == [
        f"99.0 is known now, in {table}",
        f"sources that no release had: {len(new)}",
        *(f"    {target}" for target in new),
        "known sources of 99.0 that were replaced: 0",
    ]
    assert "restoring" not in accepted.out
    afterwards = command("drift", "--against", str(fork))
    assert afterwards.code == 0
    assert all("99.0" in text for text in sources(afterwards.out).values())
    assert "targets that differ from 99.0: 0" in command("drift", "--against", str(fork), "--since", "99.0").out


def test_accept_names_the_functions_whose_version_will_not_run(command, fork, table):
    """The patches replace get_grad_norm, and wrap count_zeros."""
    file = fork / "megatron" / "core" / "optimizer" / "optimizer.py"
    source = file.read_text(encoding="utf-8").replace("class FP31Optimizer", "class FP32Optimizer")
    for function in ("get_grad_norm", "count_zeros"):
        source = source.replace(f"def {function}(self)", f"def {function}(self, *ours)", 1)
    file.write_text(source, encoding="utf-8")
    out = command("drift", "--against", str(fork), "--accept", "ours").out
    named = out.partition("functions that the patches replace: what is different in the folder's version")[2]
    assert "count_zeros" in out and "MegatronOptimizer.get_grad_norm" in named and "count_zeros" not in named


def test_accept_names_what_it_replaces_and_how_to_undo_it(command, site, fork, table):
    command("drift", "--against", str(fork), "--accept", "99.0")
    replacing = command("drift", "--against", str(site), "--accept", "99.0").out
    replaced = replacing.partition("known sources of 99.0 that were replaced: ")[2].splitlines()
    number = int(replaced[0])
    assert number > 0 and f"    {FP32_STEP}" in replaced[1 : number + 1]
    assert "of another release" in replaced[number + 1] and f"git checkout {table}" in replaced[number + 1]


@pytest.mark.parametrize("has_rest", [False, True], ids=["the fork alone", "with the rest behind it"])
def test_accept_names_the_patched_modules_that_no_folder_has(command, site, fork, table, has_rest):
    paths = [str(fork), *([str(site)] if has_rest else [])]
    modules = {edit.module for patch in PATCHES for edit in patch.edits}
    missing = {module for module in modules if not any(find_file(module, [path]) for path in paths)}
    against = os.pathsep.join(paths)
    told = command("drift", "--against", against, "--accept", "99.0").out.partition("patched modules that ")[2]
    first, *lines = told.splitlines()
    assert first == f"{against} lacks: {len(missing)}"
    assert lines[: len(missing)] == [f"    {module}" for module in sorted(missing)]
    assert ("--against CHECKOUT:FOLDER" in told) == bool(missing)
    assert f"{against} lacks: 0\n" in command("drift", "--against", against, "--accept", "99.0").out  # as before


def test_a_release_of_another_package_is_about_its_targets_alone(command, rows, verl, table):
    before = KnownSources.read(table)
    unknown = command("drift", "--against", str(verl))
    accepted = command("drift", "--against", str(verl), "--accept", "verl 99.0")
    afterwards = command("drift", "--against", str(verl))
    assert [(done.code, done.err) for done in (unknown, accepted, afterwards)] == [(1, ""), (0, ""), (0, "")]
    assert rows(unknown.out)["skip-updates-in-verl"] == ["refused"] and "detach-mtp-heads" not in rows(unknown.out)
    assert rows(afterwards.out)["skip-updates-in-verl"] == ["applied"]
    after = KnownSources.read(table)
    assert (after.releases, after.package_releases("verl")) == (before.releases, ("verl 0.9.1", "verl 99.0"))


def test_of_a_folder_that_is_no_release_a_target_can_become_known(command, sources, fork, table):
    accepted = command("drift", "--against", str(fork), "--accept", "verl's 71e418e", "--only", FP32_STEP)
    assert (accepted.code, accepted.err) == (0, "")
    assert f"verl's 71e418e is known now, in {table}\nsources that no release had: 1\n    {FP32_STEP}\n" in accepted.out
    assert f"patched modules that {fork} lacks: 0\n" in accepted.out
    afterwards = command("drift", "--against", str(fork))
    assert afterwards.code == 1 and "verl's 71e418e" in sources(afterwards.out)[FP32_STEP]


def test_a_table_that_cannot_be_written_is_named(command, fork, table, monkeypatch):
    monkeypatch.setattr(drift, "write_known_sources", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    done = command("drift", "--against", str(fork), "--accept", "99.0")
    assert done.code == 1 and f"cannot write {table}: denied" in done.err
