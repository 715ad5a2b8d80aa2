"""What fails half-way leaves nothing half done: an edit, a patch, a revert."""

from __future__ import annotations

import functools
import sys
import types

import pytest
from megatron_mtp_patches.engine import AddField, Export, PatchError, Replace, Wrap

WATER = Replace("garden:water", "ours:water")
GROW = Wrap("garden:Tree.grow", "ours:loudly")
DEPTH = AddField("garden:Bed", field="depth", type=int, default=7, doc="")
HEIGHT = AddField("garden:Bed", field="height", type=int, default=3, doc="")


def snapshot(module):
    owners = (module, module.Tree, module.Bed)
    return [dict(vars(owner)) for owner in owners] + [dict(module.Bed.__dataclass_fields__)]


def cover_function(module):
    module.water = functools.wraps(module.water)(lambda *args: "theirs")


def cover_method(module):
    module.Tree.grow = lambda self: "theirs"


def cover_constructor(module):
    mine = module.Bed.__init__
    module.Bed.__init__ = functools.wraps(mine)(lambda self, **kwargs: mine(self, **kwargs))


@pytest.mark.parametrize(
    "cover, place",
    [(cover_function, "garden:water"), (cover_method, "garden:Tree.grow"), (cover_constructor, "garden:Bed.__init__")],
)
def test_a_revert_that_somebody_s_patch_hinders_changes_nothing(garden, cover, place):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    engine = garden.applied(WATER, GROW, DEPTH, HEIGHT, Replace("shed:tool", "ours:bloom"))
    module = garden.load()
    originals = snapshot(module)
    cover(module)
    covered = snapshot(module)
    report = engine.installer.report(engine.catalog[0])
    assert report.state == "applied"
    changed = [target for target, state in report.targets.items() if state == "applied, then changed by somebody else"]
    assert changed == [place.removesuffix(".__init__")]
    for _ in range(2):
        with pytest.raises(PatchError, match=rf"^{place} was changed by somebody else.*undo that first"):
            engine.revert()
    assert snapshot(module) == covered
    assert garden.load("shed").tool(1) == "bloomed", "the patch is not half reverted: what is still to come is patched"
    for owner, old in zip((module, module.Tree, module.Bed), originals, strict=False):
        for name, value in old.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)
    engine.revert()
    assert (module.water(1), module.Tree().grow(), hasattr(module.Bed, "depth")) == ("poured 1", "grew 1", False)


def test_what_a_patch_left_as_it_was_may_be_changed_by_anybody(garden):
    engine = garden.applied(Export("garden:water", "ours:water"), GROW)
    module = garden.load()
    module.water = theirs = lambda litres: "theirs"
    engine.revert()
    assert module.water is theirs
    assert module.Tree().grow() == "grew 1"


def test_a_patch_that_fails_late_says_what_of_it_somebody_s_patch_holds_down(garden):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    engine = garden.applied(WATER, GROW, Replace("shed:tool", "ours:nowhere"))
    module = garden.load()
    mine = vars(module.Tree)["grow"]
    cover_method(module)
    with pytest.raises(PatchError, match=r"(?s)a-patch is refused: .*nowhere.*garden:Tree.grow was changed by some"):
        garden.load("shed")
    assert module.water(1) == "poured 1", "the rest of the patch is withdrawn"
    module.Tree.grow = mine
    engine.revert()
    assert module.Tree().grow() == "grew 1"


def test_a_field_that_a_subclass_cannot_take_leaves_no_trace(garden):
    module = garden.load()

    def __init__(self):
        pass

    __init__.__signature__ = "none to speak of"
    odd = type("Odd", (module.Bed,), {"__init__": __init__, "__dataclass_fields__": module.Bed.__dataclass_fields__})
    before = snapshot(module)
    engine = garden.engine(garden.patch(DEPTH))
    engine.apply("all", "skip")
    assert engine.installer.report(engine.catalog[0]).state == "refused"
    assert snapshot(module) == before and vars(odd)["__init__"] is __init__


def test_a_copy_that_cannot_be_rebound_undoes_the_edit(garden, monkeypatch):
    class Closed(types.ModuleType):
        def __getattribute__(self, name):
            raise RuntimeError("closed")

    module = garden.load()
    before = snapshot(module)
    engine = garden.engine(garden.patch(WATER))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zzz_closed", Closed("zzz_closed"))
        with pytest.raises(Exception, match="closed"):
            engine.apply("all", "raise")
    assert snapshot(module) == before
