"""python -m scripts.pins on repositories that are a framework and Megatron-LM in name only."""

import json
from pathlib import Path

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.source import find_file

from scripts.pins import __main__ as pins
from scripts.pins.table import by_patch, make_page
from tests.conformance.expected import EXPECTED

pytestmark = pytest.mark.forked("python")

STEP = "megatron.core.optimizer.optimizer:FP32Optimizer.step"


@pytest.fixture
def repositories(tmp_path, monkeypatch):
    """repositories(name, files): the commit of these files in a repository that git reads in place of GitHub's."""
    config = tmp_path / "gitconfig"
    lines = [f'[url "file://{tmp_path}/"]', "insteadOf = https://github.com/", "[user]", "name = a", "email = a@b"]
    config.write_text("\n".join([*lines, "[uploadpack]", "allowFilter = true", "allowAnySHA1InWant = true", ""]))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))

    def commit(name, files, submodule=""):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        pins.git(folder, "init", "-q")
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        pins.git(folder, "add", "-A")
        if submodule:
            pins.git(folder, "update-index", "--add", "--cacheinfo", f"160000,{submodule}")
        pins.git(folder, "commit", "-q", "-m", "a change")
        return pins.git(folder, "rev-parse", "HEAD").strip()

    return commit


@pytest.fixture
def megatron(repositories, tmp_path):
    """Megatron-LM with the sources of the installed one that matter, tagged core_v1."""
    file = find_file("megatron.core")
    if file is None:
        pytest.skip("megatron-core is not installed")
    site = file.parents[2]
    modules = {patch.probe.target.partition(":")[0] for patch in CATALOG if patch.probe}
    modules |= {module for patch in pins.PATCHES for module in patch.modules}
    paths = [Path(*module.split(".")) for module in modules]
    paths = [path / "__init__.py" if (site / path).is_dir() else path.with_suffix(".py") for path in paths]
    paths += [parent / "__init__.py" for path in paths for parent in list(path.parents)[:-2]]
    files = {str(path): (site / path).read_text(encoding="utf-8") for path in paths if (site / path).is_file()}
    commit = repositories(pins.MEGATRON, files)
    pins.git(tmp_path / pins.MEGATRON, "tag", "core_v1")
    return commit


@pytest.fixture
def pin(repositories, megatron):
    """A framework's."""
    commit = repositories("a/framework", {"pyproject.toml": 'dependencies = ["megatron-core==1"]'})
    words = {"file": "pyproject.toml", "says": "megatron-core==1", "megatron": "core_v1", "date": "today"}
    return {"framework": "A", "repository": "a/framework", "commit": commit, **words}


def test_each_patch_is_in_its_state_there(pin, megatron):
    record = pins.read(pin)
    assert record["states"] == {patch.id: EXPECTED[patch.id] for patch in pins.PATCHES}
    assert (record["framework"], record["commit"], record["unknown"]) == ("A", megatron, {})


def test_a_changed_function_is_named(pin, repositories):
    text = find_file("megatron.core.optimizer.optimizer").read_text(encoding="utf-8")
    changed = {"megatron/core/optimizer/optimizer.py": text.replace("class FP32Optimizer", "class FP31Optimizer")}
    record = pins.read({**pin, "megatron": repositories(pins.MEGATRON, changed)})
    assert record["states"]["exempt-muon-from-clipping"] == "refused"
    assert "exempt-muon-from-clipping" in record["unknown"][STEP]
    assert f"* A: `{STEP}`: " in make_page([pin], [record])
    assert "| **refused** |" in by_patch([record], ["exempt-muon-from-clipping"])
    del record["states"]["exempt-muon-from-clipping"]
    assert "| not read |" in by_patch([record], ["exempt-muon-from-clipping"]), (
        "what is not in the record is not made up"
    )


def test_a_pin_that_does_not_stand_there_ends_it(pin):
    with pytest.raises(SystemExit, match=r"A: pyproject.toml of \w+ does not say megatron-core==2"):
        pins.read({**pin, "says": "megatron-core==2"})


def test_a_submodule_is_a_pin(pin, megatron, repositories):
    commit = repositories("a/framework", {}, submodule=f"{megatron},3rdparty/Megatron-LM")
    words = {"file": "3rdparty/Megatron-LM", "says": megatron, "megatron": megatron}
    assert pins.read({**pin, "commit": commit, **words})["commit"] == megatron


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
    newer = "A: pyproject.toml of its newest commit does not say megatron-core==1; edit ci/pins.toml"
    assert (code, out.splitlines()) == (1, [newer, "pins.json is out of date: run python -m scripts.pins"])
    assert pins.TABLE.read_text(encoding="utf-8") == "[]\n"
