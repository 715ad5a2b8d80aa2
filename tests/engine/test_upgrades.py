"""A library whose files change while a process runs, or whose compiled code is not that of its files."""

from __future__ import annotations

import importlib
import py_compile
import sys

import pytest
from megatron_mtp_patches.engine import AddField, PatchError, Replace, Wrap

WATER = Replace("garden:water", "ours:water")
GROW = Wrap("garden:Tree.grow", "ours:loudly")
DEPTH = AddField("garden:Bed", field="depth", type=int, default=7, doc="")
WATER_LINE = 'return f"poured {litres}"'
CHANGED_LINE = 'return f"spilled {litres}"'


@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
def test_a_reload_of_a_changed_source_refuses_whole_patches_and_keeps_the_others(garden, policy, recwarn):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    changed = garden.patch(Replace("shed:tool", "ours:bloom"), WATER, id="changed")
    engine = garden.engine(changed, garden.patch(GROW, DEPTH, id="other"))
    engine.apply("all", policy)
    module, shed = garden.load(), garden.load("shed")
    assert (module.water(1), shed.tool(1)) == ("our 1", "bloomed")
    garden.edit("garden.py", WATER_LINE, CHANGED_LINE)
    if policy == "raise":
        with pytest.raises(PatchError, match="changed is refused: garden:water is not the source of any release"):
            importlib.reload(module)
    else:
        importlib.reload(module)
    assert sum("changed is refused" in str(warning.message) for warning in recwarn) == (policy == "warn")
    assert (module.water(1), shed.tool()) == ("spilled 1", "spade")
    assert (module.Tree().grow(), module.Bed().depth) == ("grew 1!", 7)
    assert [engine.installer.report(patch).state for patch in engine.catalog] == ["refused", "applied"]
    engine.revert()
    assert (module.Tree().grow(), hasattr(module.Bed, "depth")) == ("grew 1", False)


def test_a_reload_of_an_unchanged_source_patches_anew_and_refuses_nothing(garden):
    engine = garden.applied(WATER, GROW)
    module = garden.load()
    for _ in range(2):
        importlib.reload(module)
        assert (module.water(1), module.Tree().grow()) == ("our 1", "grew 1!")
    assert engine.installer.report(engine.catalog[0]).state == "applied"


@pytest.mark.parametrize("edit", [WATER, GROW])
def test_a_file_that_was_exchanged_after_its_import_is_not_what_runs(garden, edit):
    """What runs is not known, though the file is the source of a known release."""
    engine = garden.engine(garden.patch(edit))
    source = (garden.folder / "garden.py").read_text(encoding="utf-8")
    garden.write("garden.py", "# an older release\n\n\n" + source.replace(WATER_LINE, CHANGED_LINE))
    module = garden.load()
    garden.write("garden.py", source)
    with pytest.raises(PatchError, match=rf"{edit.target} does not run what is in .*garden\.py now"):
        engine.apply("all", "raise")
    assert (module.water(1), module.Tree().grow()) == ("spilled 1", "grew 1")


def test_compiled_code_of_an_older_file_is_not_what_is_checked(garden):
    engine = garden.engine(garden.patch(WATER))
    source = (garden.folder / "garden.py").read_text(encoding="utf-8")
    file = garden.write("garden.py", "# an older release\n\n\n" + source.replace(WATER_LINE, CHANGED_LINE))
    # as build systems do, which keep no times
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    garden.write("garden.py", source)
    engine.apply("all", "raise")
    with pytest.raises(PatchError, match=r"a-patch is refused: garden:water does not run .*delete the __pycache__"):
        garden.load()
    assert "garden" not in sys.modules


def test_a_stranger_is_seen_behind_an_edit_that_minds_none(garden):
    garden.write("stranger.py", "def grow(self, by=1):\n    return 'stranger'\n")
    tree = garden.load().Tree
    tree.grow = garden.load("stranger").grow
    careless = garden.patch(Wrap("garden:Tree.grow", "ours:loudly", any_source=True), id="careless")
    engine = garden.engine(careless, garden.patch(Replace("garden:Tree.grow", "ours:grow"), id="careful"))
    with pytest.raises(PatchError, match="careful is refused: garden:Tree.grow was already changed by stranger"):
        engine.apply("all", "raise")
    engine.apply("all", "skip")
    assert tree().grow() == "stranger!"
