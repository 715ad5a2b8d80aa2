"""`drift`: the installed Megatron, another folder, or a known release."""

from __future__ import annotations

import os
import shutil

import pytest
from megatron_mtp_patches.applied import ENGINE
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli import drift
from megatron_mtp_patches.engine.fingerprints import KnownSources
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.megatrons import installed as installed_megatron
from megatron_mtp_patches.megatrons.known import RELEASES

from tests.conformance.expected import STATE

pytestmark = pytest.mark.forked("python")

TARGETS = [edit.target for patch in CATALOG if not patch.package for edit in patch.edits if edit.check_source]
POSTPROCESS = "verl.workers.engine_workers:TrainingWorker._postprocess_output"
STEP = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"


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
def verl(tmp_path):
    """A folder with a verl that is its worker alone."""
    file = tmp_path / "verl" / "workers" / "engine_workers.py"
    file.parent.mkdir(parents=True)
    for package in list(file.parents)[:2]:
        (package / "__init__.py").touch()
    file.write_text("class TrainingWorker:\n    def _postprocess_output(self, output):\n        pass\n")
    return tmp_path


@pytest.fixture
def sources(rows):
    """sources(output): {target: what stands beside it}"""
    return lambda output: {target: cells[0] for target, cells in rows(output).items() if target in TARGETS}


def test_the_installed_release_has_no_drift(command, sources, release, site):
    done = command("drift")
    assert (done.code, done.err) == (0, "")
    assert f"megatron-core {release} (by its sources)" in done.out and str(site) in done.out.splitlines()[0]
    assert "unknown targets: 0" in done.out
    assert list(sources(done.out)) == list(dict.fromkeys(TARGETS))
    assert all(release in text for text in sources(done.out).values())


def test_a_megatron_of_no_known_release_is_called_nearest_to_one(command, release, monkeypatch):
    monkeypatch.setattr(installed_megatron, "fingerprint", lambda edit: "of a fork")
    assert f"megatron-core nearest to {release} (some of its sources" in command("drift").out.splitlines()[0]


def test_each_patch_is_shown_with_its_state_there(command, rows, site, fork):
    installed = rows(command("drift").out)
    assert [installed[patch.id] for patch in CATALOG if not patch.package] == [
        [STATE[patch.id]] for patch in CATALOG if not patch.package
    ]
    assert rows(command("drift", "--against", str(site)).out) == installed
    assert rows(command("drift", "--against", str(fork)).out)["exempt-muon-from-clipping"] == ["refused"]


def test_a_folder_is_read_instead_of_the_installed_megatron(command, sources, site, fork):
    done = command("drift", "--against", str(fork))
    known = command("drift", "--against", str(site))
    assert (done.code, known.code) == (1, 0)
    assert "unknown targets: 0" in known.out and str(site) in known.out.splitlines()[0]
    listed = sources(done.out)
    assert listed[STEP] == sources(known.out)[STEP]
    assert "no known release" in listed["megatron.core.optimizer.optimizer:FP32Optimizer.step"]
    unknown = sum("no known release" in text for text in listed.values())
    assert unknown >= 2 and f"unknown targets: {unknown}" in done.out


@pytest.mark.parametrize("against", RELEASES)
def test_against_a_release_shows_what_has_changed_since_or_before(command, sources, release, against):
    done = command("drift", "--against", against)
    differing = [target for target, text in sources(done.out).items() if against not in text]
    assert done.code == (0 if against == release else 1)
    assert bool(differing) == (against != release)
    assert f"targets that differ from {against}: {len(differing)}" in done.out
    assert f"whose source here is not that of {against}, with the releases that have" in done.out


@pytest.mark.parametrize("since", RELEASES)
def test_since_compares_a_folder_as_it_does_the_installed_megatron(command, site, since):
    installed = command("drift", "--against", since)
    folder = command("drift", "--against", str(site), "--since", since)
    assert folder.code == installed.code
    assert folder.out.splitlines()[1:] == installed.out.splitlines()[1:]
    assert folder.out.splitlines()[0].startswith(str(site))


@pytest.mark.parametrize("arguments", [["--since", "1.2.3"], ["--against", "0.18.2", "--since", "0.17.1"]])
def test_since_without_a_folder_or_a_known_release_is_wrong_usage(command, release, arguments):
    done = command("drift", *arguments)
    assert (done.code, done.out) == (2, "")
    assert "--since" in done.err


@pytest.mark.parametrize("against", ["1.2.3", "no/such/folder"])
def test_against_something_unknown_is_wrong_usage_and_lists_the_releases(command, against):
    done = command("drift", "--against", against)
    assert (done.code, done.out) == (2, "")
    assert repr(against) in done.err
    assert all(release in done.err for release in RELEASES)


def test_against_a_folder_without_megatron_is_wrong_usage(command, tmp_path):
    done = command("drift", "--against", str(tmp_path))
    assert done.code == 2 and str(tmp_path) in done.err


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
    new = [target for target, text in sources(unknown.out).items() if "no known release" in text]
    first, *rest = accepted.out.splitlines()
    assert first == f"99.0 is known now, in {table}"
    shown = [f"sources that no release had: {len(new)}", *(f"    {target}" for target in sorted(new))]
    assert rest[: len(new) + 2] == [*shown, "known sources of 99.0 that were replaced: 0"]
    assert "restoring" not in accepted.out
    known = command("drift", "--against", str(fork))
    assert known.code == 0
    assert all("99.0" in text for text in sources(known.out).values())
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


def test_the_other_releases_stay_known(command, sources, site, fork, table):
    before = sources(command("drift", "--against", str(site)).out)
    command("drift", "--against", str(fork), "--accept", "99.0")
    after = sources(command("drift", "--against", str(site)).out)
    assert {target: text.replace(", 99.0", "") for target, text in after.items()} == before


def test_a_release_that_is_accepted_again_replaces_what_was_known_of_it(command, site, fork, table):
    for folder in (fork, site, fork, site):
        accepted = command("drift", "--against", str(folder), "--accept", "99.0")
        if folder == site:
            again = command("drift", "--against", str(site), "--accept", "99.0")
            replaced, none = (
                out.partition("known sources of 99.0 that were replaced: ")[2].splitlines()
                for out in (accepted.out, again.out)
            )
            number = int(replaced[0])
            assert number > 0 and none[0] == "0" and "restoring" not in again.out
            assert f"    {STEP.replace('ChainedOptimizer', 'FP32Optimizer')}" in replaced[1 : number + 1]
            assert "of another release" in replaced[number + 1] and f"git checkout {table}" in replaced[number + 1]
            assert command("drift", "--against", str(fork)).code == 1
            first = table.read_bytes()
    assert table.read_bytes() == first


@pytest.mark.parametrize("folders", ["fork", "site", "fork site"])
def test_accept_names_the_patched_modules_that_no_folder_has(command, request, folders, table):
    paths = [str(request.getfixturevalue(name)) for name in folders.split()]
    modules = {edit.module for patch in CATALOG if not patch.package for edit in patch.edits}
    missing = {module for module in modules if not any(find_file(module, [path]) for path in paths)}
    against = os.pathsep.join(paths)
    told = command("drift", "--against", against, "--accept", "99.0").out.partition("patched modules that ")[2]
    first, *lines = told.splitlines()
    assert first == f"{against} lacks: {len(missing)}"
    assert lines[: len(missing)] == [f"    {module}" for module in sorted(missing)]
    assert ("--against CHECKOUT:FOLDER" in told) == bool(missing)


def test_of_several_folders_the_first_says_what_the_release_lacks(command, sources, site, fork, table):
    both = f"{fork}{os.pathsep}{site}"
    command("drift", "--against", both, "--accept", "99.0")
    assert all(command("drift", "--against", str(folder)).code == 0 for folder in (fork, site))
    listed = sources(command("drift", "--against", str(fork)).out)
    assert "99.0" in listed[STEP.replace("ChainedOptimizer", "FP32Optimizer")]


@pytest.mark.parametrize("words", [["--accept", "99.0"], ["--accept", "99.0", "--against", "0.18.2"]], ids=" ".join)
def test_accept_without_a_folder_is_wrong_usage(command, table, words):
    before = table.read_bytes()
    done = command("drift", *words)
    assert (done.code, done.out) == (2, "") and "--against FOLDER --accept RELEASE" in done.err
    assert table.read_bytes() == before


def test_a_release_of_another_package_is_about_its_targets_alone(command, rows, verl, table):
    before = KnownSources.read(table)
    unknown = command("drift", "--against", str(verl))
    accepted = command("drift", "--against", str(verl), "--accept", "verl 99.0")
    assert (unknown.code, accepted.code, accepted.err) == (1, 0, "")
    assert rows(unknown.out)["skip-updates-in-verl"] == ["refused"] and "detach-mtp-heads" not in rows(unknown.out)
    known = command("drift", "--against", str(verl))
    assert (
        known.code == 0
        and rows(known.out)[POSTPROCESS] == ["verl 99.0"]
        and rows(known.out)["skip-updates-in-verl"] == ["applied"]
    )
    after = KnownSources.read(table)
    assert (after.releases, after.package_releases("verl")) == (before.releases, ("verl 0.9.1", "verl 99.0"))
    changed = {target for target, row in after.targets.items() if row != before.targets[target]}
    assert changed == {
        edit.target for patch in CATALOG if patch.package == "verl" for edit in patch.edits if edit.check_source
    }


def test_of_a_folder_that_is_no_release_a_target_can_become_known(command, sources, fork, table):
    before = KnownSources.read(table)
    target = STEP.replace("ChainedOptimizer", "FP32Optimizer")
    accepted = command("drift", "--against", str(fork), "--accept", "verl's 71e418e", "--only", target)
    assert (accepted.code, accepted.err) == (0, "")
    assert f"verl's 71e418e is known now, in {table}\nsources that no release had: 1\n    {target}\n" in accepted.out
    known = command("drift", "--against", str(fork))
    assert known.code == 1 and "verl's 71e418e" in sources(known.out)[target]
    after = KnownSources.read(table)
    assert after.releases == before.releases
    assert [name for name, row in after.targets.items() if row != before.targets[name]] == [target]


def test_a_single_target_of_a_known_release_is_replaced_alone(command, release, fork, table):
    before = KnownSources.read(table)
    target = STEP.replace("ChainedOptimizer", "FP32Optimizer")
    accepted = command("drift", "--against", str(fork), "--accept", release, "--only", target)
    assert f"known sources of {release} that were replaced: 1\n    {target}\n" in accepted.out
    assert f"patched modules that {fork} lacks: 0\n" in accepted.out
    after = KnownSources.read(table)
    assert after.releases == before.releases
    sources = before.release_fingerprints(release)
    assert {name for name, digest in after.release_fingerprints(release).items() if sources[name] != digest} == {target}
    assert after.release_fingerprints(release).keys() == sources.keys()


@pytest.mark.parametrize("words", [["--only", STEP], ["--accept", "a's b", "--only", f"{STEP}s"]], ids=" ".join)
def test_only_goes_with_accept_and_a_target(command, fork, table, words):
    before = table.read_bytes()
    done = command("drift", "--against", str(fork), *words)
    assert (done.code, done.out) == (2, "") and "--only TARGET goes with --accept NAME" in done.err
    assert table.read_bytes() == before


@pytest.mark.parametrize("name", ["0.9.2", "Verl 0.9.2", "ms-swift 4.7.0"])
def test_a_name_that_does_not_fit_what_is_in_the_folder_is_wrong_usage(command, verl, table, name):
    before = table.read_bytes()
    done = command("drift", "--against", str(verl), "--accept", name)
    assert (done.code, done.out) == (2, "") and f"--accept {name!r}" in done.err
    assert "verl" in done.err.rpartition("packages")[2]
    assert table.read_bytes() == before


def test_a_table_that_cannot_be_written_is_named(command, fork, table, monkeypatch):
    monkeypatch.setattr(drift, "write_known_sources", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    done = command("drift", "--against", str(fork), "--accept", "99.0")
    assert done.code == 1 and f"cannot write {table}: denied" in done.err
