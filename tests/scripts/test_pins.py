"""python -m scripts.pins on repositories that are a framework and Megatron-LM in name only."""

from __future__ import annotations

import difflib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.source import find_file

from scripts.pins import __main__ as pins
from scripts.pins.table import make_page
from tests.conformance.expected import EXPECTED

pytestmark = pytest.mark.forked("python")

STEP = "megatron.core.optimizer.optimizer:FP32Optimizer.step"


@pytest.fixture
def repositories(tmp_path, monkeypatch):
    """Repositories at the places of GitHub's: git reads them instead."""
    config = tmp_path / "gitconfig"
    lines = [f'[url "file://{tmp_path}/"]', "insteadOf = https://github.com/", "[user]", "name = a", "email = a@b"]
    config.write_text("\n".join([*lines, "[uploadpack]", "allowFilter = true", "allowAnySHA1InWant = true", ""]))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))

    def commit(name, files):
        """Commit these files in the repository of this name, and return the commit."""
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)

        def run(*words):
            return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True)

        run("init", "-q")
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        run("add", "-A")
        run("commit", "-q", "-m", "a change", "--allow-empty")
        return SimpleNamespace(run=run, id=run("rev-parse", "HEAD").stdout.strip())

    return commit


@pytest.fixture
def megatron(repositories):
    """Megatron-LM with the sources of the installed one that matter, tagged core_v1."""
    file = find_file("megatron.core")
    if file is None:
        pytest.skip("megatron-core is not installed")
    modules = {patch.probe.target.partition(":")[0] for patch in CATALOG if patch.probe}
    modules |= {module for patch in pins.PATCHES for module in patch.modules}
    site = file.parents[2]
    found = [Path(*module.split(".")) for module in modules]
    found = [path / "__init__.py" if (site / path).is_dir() else path.with_suffix(".py") for path in found]
    found += [parent / "__init__.py" for path in found for parent in list(path.parents)[:-2]]
    files = {str(path): (site / path).read_text(encoding="utf-8") for path in found if (site / path).is_file()}
    made = repositories(pins.MEGATRON, files)
    made.run("tag", "core_v1")
    return made


@pytest.fixture
def pin(repositories, megatron):
    """A framework's."""
    commit = repositories("a/framework", {"pyproject.toml": 'dependencies = ["megatron-core==1"]'}).id
    words = {"file": "pyproject.toml", "says": "megatron-core==1", "megatron": "core_v1", "date": "today"}
    return {"framework": "A", "repository": "a/framework", "commit": commit, **words}


def test_each_patch_is_in_its_state_there(pin, megatron):
    found = pins.read(pin)
    assert found["states"] == {patch.id: EXPECTED[patch.id] for patch in pins.PATCHES}
    assert (found["framework"], found["commit"], found["unknown"]) == ("A", megatron.id, {})


def test_a_framework_s_own_patch_counts(pin, megatron, repositories):
    before = find_file("megatron.core.optimizer.optimizer").read_text(encoding="utf-8").splitlines(keepends=True)
    after = [line.replace("class FP32Optimizer", "class FP31Optimizer") for line in before]
    change = "".join(
        difflib.unified_diff(before, after, *(f"{side}/megatron/core/optimizer/optimizer.py" for side in "ab"))
    )
    commit = repositories("a/framework", {"docker/megatron.patch": change}).id
    found = pins.read({**pin, "commit": commit, "patches": ["docker/megatron.patch"]})
    assert found["states"]["exempt-muon-from-clipping"] == "refused"
    assert "exempt-muon-from-clipping" in found["unknown"][STEP]
    page = make_page([pin], [found], ["exempt-muon-from-clipping", "a-new-patch"])
    assert "| **refused** |" in page and f"* A: `{STEP}`: " in page
    assert "| not read |" in page, "what is not in the record is not made up"


def test_a_pin_that_does_not_stand_there_ends_it(pin):
    with pytest.raises(SystemExit, match=r"A: pyproject.toml of \w+ does not say megatron-core==2"):
        pins.read({**pin, "says": "megatron-core==2"})


def test_a_submodule_is_a_pin(pin, megatron, repositories):
    folder = repositories("a/framework", {})
    folder.run("update-index", "--add", "--cacheinfo", f"160000,{megatron.id},3rdparty/Megatron-LM")
    folder.run("commit", "-q", "-m", "a submodule")
    commit = folder.run("rev-parse", "HEAD").stdout.strip()
    words = {"file": "3rdparty/Megatron-LM", "says": megatron.id, "megatron": megatron.id}
    assert pins.read({**pin, "commit": commit, **words})["commit"] == megatron.id


def test_check_tells_of_a_newer_pin_and_of_an_old_record(pin, repositories, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pins, "ROOT", tmp_path)
    monkeypatch.setattr(pins, "DATA", tmp_path / "pins.toml")
    monkeypatch.setattr(pins, "TABLE", tmp_path / "pins.json")
    text = "\n".join(["[[pin]]", *(f"{name} = {json.dumps(value)}" for name, value in pin.items())])
    pins.DATA.write_text(text, encoding="utf-8")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["scripts.pins", *words])
        return pins.main(), capsys.readouterr().out

    assert run() == (0, "")
    assert run("--check") == (0, "up to date\n")
    repositories("a/framework", {"pyproject.toml": 'dependencies = ["megatron-core==2"]'})
    pins.TABLE.write_text("[]\n", encoding="utf-8")
    code, out = run("--check")
    assert code == 1
    newer, stale = out.splitlines()
    assert newer == "A: pyproject.toml of its newest commit does not say megatron-core==1; edit ci/pins.toml"
    assert stale == "pins.json is out of date: run python -m scripts.pins"
    assert pins.TABLE.read_text(encoding="utf-8") == "[]\n"
