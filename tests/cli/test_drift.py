"""`drift`: the installed Megatron, another folder, or a known release."""

from __future__ import annotations

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.fingerprints import is_checked
from megatron_mtp_patches.engine.source import find_file

TARGETS = [edit.target for patch in CATALOG for edit in patch.edits if is_checked(edit)]
RELEASES = ["0.16.1", "0.17.1", "0.18.2", "0.19.2"]


@pytest.fixture(scope="module")
def site():
    """The folder that holds the installed megatron."""
    return find_file("megatron.core").parents[2]


def rows(output: str) -> dict[str, str]:
    """{target: what stands beside it}"""
    cells = [[cell.strip() for cell in line.strip("│┃| ").split("│")] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1] for row in cells if row[0] in TARGETS}


def test_the_installed_release_has_no_drift(command, release, site):
    done = command("drift")
    assert done.returncode == 0, done.stderr
    assert f"like {release}" in done.stdout and str(site) in done.stdout.splitlines()[0]
    assert "0 targets are not known" in done.stdout
    assert list(rows(done.stdout)) == list(dict.fromkeys(TARGETS))
    assert all(release in text for text in rows(done.stdout).values())


def test_a_folder_is_read_instead_of_the_installed_one(command, site, tmp_path):
    file = tmp_path / "megatron" / "core" / "optimizer" / "optimizer.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (file.parent / "__init__.py").touch()
    source = (site / file.relative_to(tmp_path)).read_text(encoding="utf-8")
    file.write_text(source.replace("class FP32Optimizer", "class FP31Optimizer"), encoding="utf-8")
    done = command("drift", "--against", str(tmp_path))
    found = rows(done.stdout)
    known = command("drift", "--against", str(site))
    assert (done.returncode, known.returncode) == (1, 0)
    assert "0 targets are not known" in known.stdout and str(site) in known.stdout.splitlines()[0]
    assert (
        found["megatron.core.optimizer.optimizer:ChainedOptimizer.step"]
        == rows(known.stdout)["megatron.core.optimizer.optimizer:ChainedOptimizer.step"]
    )
    assert "no known release" in found["megatron.core.optimizer.optimizer:FP32Optimizer.step"]
    unknown = sum("no known release" in text for text in found.values())
    assert unknown >= 2 and f"{unknown} targets are not known" in done.stdout


@pytest.mark.parametrize("against", RELEASES)
def test_a_release_tells_what_has_changed_since_or_before(command, release, against):
    done = command("drift", "--against", against)
    differing = [target for target, text in rows(done.stdout).items() if against not in text]
    assert done.returncode == (0 if against == release else 1)
    assert bool(differing) == (against != release)
    assert f"{len(differing)} targets differ from {against}" in done.stdout


@pytest.mark.parametrize("since", RELEASES)
def test_a_folder_compared_with_a_release(command, site, since):
    installed = command("drift", "--against", since)
    folder = command("drift", "--against", str(site), "--since", since)
    assert folder.returncode == installed.returncode
    assert folder.stdout.splitlines()[1:] == installed.stdout.splitlines()[1:]
    assert folder.stdout.splitlines()[0].startswith(str(site))


@pytest.mark.parametrize("arguments", [["--since", "1.2.3"], ["--against", "0.18.2", "--since", "0.17.1"]])
def test_since_goes_with_a_folder_and_a_release(command, arguments):
    done = command("drift", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--since" in done.stderr


@pytest.mark.parametrize("against", ["1.2.3", "no/such/folder"])
def test_nonsense_is_wrong_usage_and_lists_what_is_known(command, against):
    done = command("drift", "--against", against)
    assert (done.returncode, done.stdout) == (2, "")
    assert repr(against) in done.stderr
    assert all(release in done.stderr for release in RELEASES)


def test_a_folder_without_megatron_is_wrong_usage(command, tmp_path):
    done = command("drift", "--against", str(tmp_path))
    assert done.returncode == 2 and str(tmp_path) in done.stderr


def test_without_a_megatron_there_is_nothing_to_compare(monkeypatch, capsys):
    from megatron_mtp_patches.cli import drift, main, megatron

    for module in (drift, megatron):
        monkeypatch.setattr(module, "find_file", lambda name: None)
    for words in (["drift"], ["drift", "--against", "0.18.2"]):
        assert main(words) == 1
        assert "megatron-core is not installed" in capsys.readouterr().err
