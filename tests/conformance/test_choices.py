"""The code of docs/api.md that chooses patches after the import runs as it stands."""

import ast
import re

import megatron_mtp_patches
import pytest
from megatron.core.models.gpt.gpt_model import GPTModel

from tests.faults.test_second_import import import_package_again
from tests.pages import ROOT

pytestmark = pytest.mark.forked("megatron")

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
CODE = re.search(r"<!-- tests/conformance/test_choices.py runs this -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1]
LEFT_OUT, REPAIR, FEATURE = "pass-rope-scaling-factor", "count-loss-tokens-over-cp", "floor-clip-coefficient"


def test_each_line_chooses_what_the_page_says(monkeypatch):
    megatron_mtp_patches.revert()
    original = GPTModel.__init__
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "none")
    import_package_again(monkeypatch)
    names, states = {}, []
    for statement in ast.parse(CODE).body:
        exec(ast.unparse(statement), names)
        told = {report.id: str(report.state) for report in names["patches"].status()}
        states.append([told[one] for one in (LEFT_OUT, REPAIR, FEATURE)] + [GPTModel.__init__ is original])
    off, on = "disabled", "applied"
    assert [one[:3] for one in states] == [[off, off, off], [off, on, off], [on, on, off], [off, off, off]]
    assert [states[number][3] for number in (0, 2, 3)] == [True, False, True]


def test_an_unknown_id_leaves_the_former_choice(monkeypatch):
    megatron_mtp_patches.apply(REPAIR)
    with pytest.raises(megatron_mtp_patches.PatchError, match="unknown patch 'nonsense'"):
        megatron_mtp_patches.apply("nonsense")
    assert [report.id for report in megatron_mtp_patches.status() if report.state == "applied"] == [REPAIR]
