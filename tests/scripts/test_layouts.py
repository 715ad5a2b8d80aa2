"""python -m scripts.layouts: its committed page, what counts as good, and arguments that cannot be used."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from megatron_mtp_patches.rehearsal import transformer_engine

from scripts import study
from scripts.layouts import table, training
from scripts.layouts.__main__ import main
from scripts.layouts.cases import LAYOUTS

pytestmark = pytest.mark.forked("python")
ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "ci" / "layouts"


def test_the_page_says_what_the_record_says():
    record = json.loads((TABLE / "cpu.json").read_text(encoding="utf-8"))
    page = study.page(table.TITLE, table.make_tables(record), table.ABOUT)
    assert page == (TABLE / "cpu.md").read_text(encoding="utf-8")


def test_the_record_has_each_layout_of_five_megatrons_and_all_are_good():
    record = json.loads((TABLE / "cpu.json").read_text(encoding="utf-8"))
    assert list(record) == ["0.16.1", "0.17.1", "0.18.2", "0.19.0", "main"]
    names = [layout.name for layout in LAYOUTS]
    for row in record.values():
        assert list(row["layouts"]) == names
        assert all(map(table.is_good, row["layouts"].values()))


@pytest.mark.parametrize(
    "what, good",
    [
        ({}, True),
        ({"difference": 0.004}, True),
        ({"difference": 0.006}, False),
        ({"verified": False}, False),
        ({"resumes": False}, False),
        ({"resumes": False, "left_out": "it cannot"}, True),
        ({"error": "run ended with 1"}, False),
        ({"losses": [], "left_out": "it cannot"}, True),
    ],
)
def test_what_is_good(what, good):
    result = {**asdict(training.Result(1, [4.0], resumes=True, verified=True)), **what}
    assert table.is_good(result) is good


def test_numbers_that_are_not_finite_or_not_there_are_an_error(monkeypatch):
    printed = " iteration {}/6 | lm loss: {} | mtp_1 loss: 5 | mtp_2 loss: 5 | grad norm: 1 | mtp grad norm: 1 |\n"
    for losses, why in (([1, 1, "nan", 1, 1, 1], "not finite"), ([1, 1, 1, 1, 1], "iterations")):
        output = "".join(printed.format(number, loss) for number, loss in enumerate(losses, start=1))
        monkeypatch.setattr(training, "_run", lambda *args, output=output: output)
        with pytest.raises(training.TrainingError, match=why):
            training._train(Path(), 1, [])


def test_arguments_that_cannot_be_used(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(transformer_engine, "available", lambda: True)
    megatron = ("--megatron", tmp_path)
    assert "'DP3' is none of: 1 rank; DP2; TP2, sequence parallel" in refused(main, *megatron, "--layout", "DP3")
    assert "neither a git repository nor a folder that holds megatron/core" in refused(main, *megatron)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert "--release: say which" in refused(main, *megatron)
    package = tmp_path / "tree" / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 2\n")
    megatron = ("--megatron", tmp_path / "tree")
    assert "holds no pretrain_gpt.py; give Megatron-LM itself" in refused(main, *megatron)
    monkeypatch.setattr(transformer_engine, "available", lambda: False)
    assert "has no TransformerEngine to rehearse with:" in refused(main, *megatron)
