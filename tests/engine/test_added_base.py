"""Base patches that a command adds to an engine: when they are in force, around what, and what a failure leaves."""

from __future__ import annotations

import sys

import pytest
from megatron_mtp_patches.engine import AddField, Export, PatchError, Replace, Wrap

LOUDLY = Wrap("garden:water", "ours:loudly")
TWICE = Wrap("garden:water", "ours:twice", any_source=True)
GROW = Wrap("garden:Tree.grow", "ours:loudly", any_source=True)
DEPTH = AddField("garden:Bed", field="depth", type=int, default=7, doc="")
TOOL = Wrap("shed:tool", "ours:loudly", any_source=True)
NOWHERE = Wrap("garden:Tree.species", "ours:nowhere", any_source=True)
SHED = "def tool():\n    return 'spade'\n"


def added(garden, *edits):
    return garden.patch(*edits, id="added")


def snapshot(module):
    owners = (module, module.Tree, module.Bed)
    return [dict(vars(owner)) for owner in owners] + [dict(module.Bed.__dataclass_fields__)]


@pytest.mark.parametrize("added_first", [True, False], ids=["before the first apply", "while active"])
def test_it_wraps_around_all_others_whenever_it_is_added(garden, garden_first, added_first):
    engine = garden.engine(garden.patch(LOUDLY), base=(garden.patch(Wrap("garden:water", "ours:named"), id="base"),))
    if garden_first:
        garden.load()
    if added_first:
        engine.add_base(added(garden, TWICE))
    engine.apply("all", "raise")
    engine.add_base(added(garden, TWICE))
    assert garden.load().water(1) == "NoneType poured 1! twice"
    engine.apply("all", "raise")
    assert garden.load().water(1) == "NoneType poured 1! twice"


def test_it_wraps_around_a_replacement_that_is_there_already(garden):
    engine = garden.applied(Replace("garden:water", "ours:water"))
    garden.load()
    engine.add_base(added(garden, TWICE))
    assert garden.load().water(1) == "our 1 twice"


def test_apply_add_revert_apply_is_the_identity(garden, garden_first):
    garden.write("user.py", "from garden import water\n")
    engine = garden.engine(garden.patch(LOUDLY, DEPTH))
    if garden_first:
        originals = snapshot(garden.load())
    engine.apply("all", "raise")
    engine.add_base(added(garden, TWICE, GROW, DEPTH))
    module, user = garden.load(), garden.load("user")
    report = engine.installer.report(engine.catalog[0])
    for _ in range(2):
        assert (module.water(1), user.water(1), module.Tree().grow()) == ("poured 1! twice",) * 2 + ("grew 1!",)
        assert module.Bed().depth == 7
        assert engine.installer.report(engine.catalog[0]) == report
        engine.revert()
        if garden_first:
            assert snapshot(module) == originals
        assert (module.water(1), user.water(1), module.Tree().grow()) == ("poured 1", "poured 1", "grew 1")
        assert not hasattr(module.Bed, "depth")
        engine.apply("all", "raise")


def test_it_is_in_force_whatever_is_selected(garden, garden_first):
    engine = garden.engine(garden.patch(LOUDLY))
    if garden_first:
        garden.load()
    engine.apply("none", "raise")
    engine.add_base(added(garden, TWICE))
    assert garden.load().water(1) == "poured 1 twice"
    with pytest.raises(PatchError, match="unknown patch '-added'"):
        engine.apply("-added", "raise")


def test_after_a_revert_it_waits_for_the_next_apply(garden, garden_first):
    garden.write("shed.py", SHED)
    engine = garden.applied(LOUDLY)
    if garden_first:
        garden.load(), garden.load("shed")
    engine.revert()
    assert engine.installer.report(engine.catalog[0]).state == "disabled"
    engine.add_base(added(garden, TWICE, TOOL))
    assert (garden.load().water(1), garden.load("shed").tool()) == ("poured 1", "spade")
    engine.apply("none", "raise")
    assert (garden.load().water(1), garden.load("shed").tool()) == ("poured 1 twice", "spade!")


def test_a_second_addition_does_nothing(garden, garden_first):
    engine = garden.applied(GROW)
    if garden_first:
        garden.load()
    engine.add_base(added(garden, TWICE))
    finders = list(sys.meta_path)
    engine.add_base(added(garden, TWICE))
    assert garden.load().water(1) == "poured 1 twice"
    engine.apply("all", "raise")
    assert sys.meta_path == finders, "nothing new is watched"
    assert len(engine.added) == 1
    engine.revert()
    assert garden.load().water(1) == "poured 1"


def test_a_base_patch_that_is_added_too_stays_where_it_is(garden):
    engine = garden.engine(garden.patch(LOUDLY), base=(added(garden, TWICE),))
    engine.add_base(added(garden, TWICE))
    engine.apply("all", "raise")
    assert garden.load().water(1) == "poured 1 twice!"


def test_the_hook_learns_of_the_modules_that_it_edits(garden):
    garden.write("shed.py", SHED)
    engine = garden.applied(LOUDLY)
    engine.add_base(added(garden, TOOL))
    assert garden.load("shed").tool() == "spade!"
    assert garden.load().water(1) == "poured 1!"


def test_the_hook_learns_of_the_module_that_its_wrapper_is_in(garden):
    """The wrapper's module imports the target, which therefore waits for the wrapper."""
    garden.write("shed.py", SHED)
    garden.write("ours_shed.py", "import shed\n\ndef oil(wrapped, *call):\n    return 'oiled ' + wrapped()\n")
    engine = garden.applied(LOUDLY)
    engine.add_base(added(garden, Wrap("shed:tool", "ours_shed:oil", any_source=True)))
    garden.load("ours_shed")
    assert garden.load("shed").tool() == "oiled spade"


def test_a_module_that_came_past_the_hook_is_caught_up_with(garden):
    garden.write("shed.py", SHED)
    engine = garden.applied(TOOL)
    finders = list(sys.meta_path)
    engine.add_base(added(garden, TWICE))
    sys.meta_path[:] = finders
    assert garden.load().water(1) == "poured 1"
    engine.catch_up()
    assert garden.load().water(1) == "poured 1 twice"


def test_a_target_that_is_missing_is_a_warning(garden):
    garden.load()
    engine = garden.applied(GROW)
    with pytest.warns(UserWarning, match="has no garden:drain, on which it relies"):
        engine.add_base(added(garden, Wrap("garden:drain", "ours:loudly", any_source=True), TWICE))
    assert garden.load().water(1) == "poured 1 twice"


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_drift", ["raise", "warn", "skip"])
def test_one_that_fails_raises_and_leaves_the_engine_as_it_was(garden, on_drift):
    garden.write("shed.py", SHED)
    engine = garden.engine(garden.patch(LOUDLY))
    engine.apply("all", on_drift)
    module, shed = garden.load(), garden.load("shed")
    before = snapshot(module)
    patch = added(garden, TWICE, GROW, DEPTH, Export("garden:shower", "ours:water"), NOWHERE, TOOL)
    with pytest.raises(PatchError, match=r"added is refused: .*nowhere"):
        engine.add_base(patch)
    assert snapshot(module) == before and shed.tool() == "spade"
    assert engine.active and module.water(1) == "poured 1!"
    garden.load("ours").nowhere = garden.load("ours").loudly
    engine.add_base(patch)
    assert (module.water(1), module.Tree.species(), shed.tool()) == ("poured 1! twice", "oak!", "spade!")


def test_one_that_fails_in_a_later_module_is_taken_out_of_the_first(garden):
    garden.write("shed.py", SHED)
    engine = garden.applied(LOUDLY)
    module = garden.load()
    garden.load("shed")
    with pytest.raises(PatchError, match="added is refused: .*nowhere"):
        engine.add_base(added(garden, TWICE, Wrap("shed:tool", "ours:nowhere", any_source=True)))
    assert module.water(1) == "poured 1!"
    engine.apply("all", "raise")
    assert module.water(1) == "poured 1!"


@pytest.mark.parametrize("on_drift", ["raise", "skip"])
def test_one_that_fails_when_its_module_arrives_fails_the_import(garden, on_drift):
    engine = garden.engine(garden.patch(LOUDLY))
    engine.apply("all", on_drift)
    engine.add_base(added(garden, TWICE, NOWHERE))
    for _ in range(2):
        with pytest.raises(PatchError, match=r"added is refused: .*nowhere"):
            garden.load()
        assert "garden" not in sys.modules


def test_another_patch_that_is_refused_in_the_same_module_leaves_nothing_of_it(garden):
    garden.write("shed.py", SHED)
    engine = garden.applied(LOUDLY, Replace("shed:tool", "ours:nowhere"))
    module = garden.load()
    with pytest.raises(PatchError, match="a-patch is refused"):
        garden.load("shed")
    with pytest.raises(PatchError, match="a-patch is refused"):
        engine.add_base(added(garden, TWICE))
    assert module.water(1) == "poured 1"
