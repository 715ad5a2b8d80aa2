"""python -m scripts.replay on a tree that is Megatron-LM in name only."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from scripts.replay import __main__ as replay
from scripts.replay import report
from scripts.replay.source import Repository, Tree
from scripts.replay.verdicts import VERDICTS, doubtful

pytestmark = [
    pytest.mark.forked("torch"),
    pytest.mark.real_process("a replay starts interpreters: a checkout shadows the installed Megatron"),
]
TESTS = """
import os

import pytest
import transformer_engine as te
from transformer_engine.pytorch.fp8 import check_fp8_support
from megatron.core.package_info import MAJOR, nothing
from megatron.core.utils import is_fa_min_version

PATCHED = os.environ["MEGATRON_MTP_PATCHES"] != "none"
fp8, reason = check_fp8_support()

def test_passes(): assert MAJOR == 0
def test_is_fixed(): assert PATCHED, "0x7f00 is not there"
def test_is_broken(): assert not PATCHED, "as the patches have it"
def test_needs_a_package(): te.Linear(1)
def test_needs_a_name(): nothing(1)
def test_fails(): raise ValueError("no way")
@pytest.mark.skipif(not fp8, reason=reason)
def test_is_skipped(): ...
@pytest.mark.skipif(is_fa_min_version("2"), reason="no")
def test_asks_for_a_version(): ...
"""


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="a verdict is that it is missing")
def test_every_verdict(write_tree, tmp_path, monkeypatch, capsys):
    """On a GPU's terms: the processes of a rehearsal would import torch first, eight times."""
    files = {"optimizer/test_all": TESTS, "new/test_all": TESTS, "inference/test_left_out": "def test_it(): ..."}
    files["new/test_fails"] = "def test_fails(): raise ValueError('no way')"
    write_tree(tmp_path / "tree", **files)
    words = ["--megatron", f"{tmp_path / 'tree'}", "--ranks", "1", "--device", "gpu", "--work", f"{tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["scripts.replay", *words])
    assert replay.main() == 1
    assert "newly failing on 1: tests/unit_tests/optimizer/test_all.py::test_is_broken" in capsys.readouterr().out
    table = json.loads((tmp_path / "tables/gpu/0.18.2.json").read_text())
    counts = dict(zip(VERDICTS, (2, 1, 3, 2, 3, 6, 0), strict=True))
    assert table["totals"] == {"1": counts}
    passing = {"1": ["test_asks_for_a_version", "test_is_fixed", "test_passes"]}
    assert table["passing with the patches"] == {"new/test_all.py": passing, "optimizer/test_all.py": passing}
    assert table["causes of the rest"] == {
        "1": {
            "newly failing": {"failed: AssertionError: as the patches have it": 2},
            "failing either way": {"ValueError: no way": 3},
            "skipped": {"needs TransformerEngine": 4, "needs megatron.core.package_info.nothing": 2},
        }
    }
    page = tmp_path / "tables/gpu/0.18.2.md"
    assert report.passing_files(page, 1) == [*table["passing with the patches"]]
    assert report.read_totals(page, 1) == counts
    text = page.read_text()
    assert "| optimizer/test_all.py | 2 | 1 |  | 1 | 1 | 3 |  |" in text
    assert "| new/test_all.py |  |  | 3 | 1 | 1 | 3 |  |" in text
    assert "| `optimizer/test_all.py::test_is_fixed` | 1 | AssertionError: … is not there |" in text
    assert " | inference/test_left_out.py |" in text.partition("## Left out")[2]


def test_each_file_is_in_one_suite_or_left_out(write_tree, tmp_path):
    names = ["optimizer/test_a", "test_optimizer", "transformer/moe/test_b", "transformer/test_c", "new/folder/test_d"]
    write_tree(tmp_path, **dict.fromkeys([*names, "inference/test_e", "optimizer/test_a_of_main"], ""))
    shares = {name: files for name, files in replay.share_out(Tree("0.18.2", tmp_path, "")).items() if files}
    reason = next(name for name in shares if name.startswith("generates text"))
    assert shares == {
        "optimizer": ["optimizer/test_a.py", "test_optimizer.py"],
        "mixture of experts": ["transformer/moe/test_b.py"],
        "transformer": ["transformer/test_c.py"],
        "everything else": ["new/folder/test_d.py"],
        reason: ["inference/test_e.py"],
    }


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("nowhere", "nowhere: no such folder"),
        (".", "neither a git repository nor a folder that holds megatron/core"),
        ("tree --release 0.19.0", "tree is 0.18.2 and has no history. Leave --release out"),
        ("tree --suite all", "'all' is none of: optimizer; "),
        ("tree --suite optimizer --ranks 3", "no test has run"),
        ("tree --suite optimizer --ranks 1 --minutes 0", "no test has run"),
    ],
)
def test_arguments_that_cannot_be_used(tree, tmp_path, monkeypatch, refused, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(replay.main, "--work", "work", "--megatron", *arguments.split())
    assert not list(tmp_path.rglob("0.18.2.md"))


def test_a_tag_and_a_file_of_another_commit(write_tree, tree, tmp_path):
    git = ["git", "-C", tree, "-c", "user.name=N", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name, test in (("core_v0.18.2", "def test_old(): ..."), ("core_v0.19.0", "def test_mtp_new(): ...")):
        write_tree(tree, **{"optimizer/test_clip_grads": test})
        for words in (["add", "-A"], ["commit", "-qm", name], ["tag", name]):
            subprocess.run([*git, *words], check=True)
    (tree / "tests/unit_tests/optimizer/test_all.py").unlink()
    repository = Repository(str(tree), tmp_path / "work")
    unpacked = repository.unpack("0.18.2")
    tests = unpacked.folder / "tests" / "unit_tests"
    assert (tests / "optimizer/test_all.py").is_file()
    assert "test_old" in (tests / "optimizer/test_clip_grads.py").read_text()
    taken = repository.take(unpacked, "core_v0.19.0", "optimizer/test_clip_grads.py")
    assert taken == "optimizer/test_clip_grads_of_core_v0_19_0.py"
    assert "test_mtp_new" in (tests / taken).read_text()


@pytest.mark.parametrize(
    "plain, patched, once",
    [
        ("passed", "failed", True),
        ("hung", "passed", True),
        ("failed", "crashed", True),
        ("hung", "hung", False),
        ("failed", "passed", False),
    ],
)
def test_what_runs_once_more(plain, patched, once):
    outcomes = {"test": (plain, "")}, {"test": (patched, "")}
    assert doubtful("test", *outcomes) == once
