"""Who gets patched, when, and what happens where a patch cannot be installed or taken out."""

from __future__ import annotations

import functools
import importlib
import sys
import types

import pytest
from megatron_mtp_patches.engine import AddField, Export, PatchError, Replace, Wrap

WATER = Replace("garden:water", "ours:water")
GROW = Replace("garden:Tree.grow", "ours:grow")
LOUDLY = Wrap("garden:water", "ours:loudly")
DEPTH = AddField("garden:Bed", field="depth", type=int, default=7, doc="")
NOWHERE = Replace("garden:Tree.species", "ours:nowhere")  # the target is there, the override is not


def state(engine, number=0):
    return engine.installer.report(engine.catalog[number]).state


def snapshot(*owners):
    return [dict(vars(owner)) for owner in owners]


def test_a_patch_is_pending_until_its_module_arrives(garden):
    engine = garden.applied(WATER)
    report = engine.installer.report(engine.catalog[0])
    assert (report.state, report.targets) == ("pending", {"garden:water": "pending"})
    assert "garden" in report.reason and "garden" not in sys.modules
    garden.load()
    report = engine.installer.report(engine.catalog[0])
    assert (report.state, report.targets, report.summary) == ("applied", {"garden:water": "applied"}, "Do something")


def test_applying_twice_installs_once(garden):
    engine = garden.applied(LOUDLY, DEPTH)
    module = garden.load()
    engine.apply("all", "raise")
    importlib.import_module("garden")
    assert module.water(1) == "poured 1!"
    engine.revert()
    engine.revert()
    assert module.water(1) == "poured 1"


def test_only_selected_patches_are_installed(garden):
    engine = garden.engine(garden.patch(WATER, id="one"), garden.patch(GROW, id="two"))
    engine.apply("-one", "raise")
    module = garden.load()
    assert (module.water(1), module.Tree().grow()) == ("poured 1", "our tree grew 1")
    assert (state(engine, 0), state(engine, 1)) == ("disabled", "applied")
    engine.apply("one", "raise")
    assert (module.water(1), module.Tree().grow()) == ("our 1", "grew 1")
    engine.apply("none", "raise")
    assert (module.water(1), module.Tree().grow()) == ("poured 1", "grew 1")


def test_base_patches_are_installed_whatever_is_selected(garden):
    engine = garden.engine(garden.patch(GROW), base=(garden.patch(WATER, id="base"),))
    engine.apply("none", "raise")
    module = garden.load()
    assert (module.water(1), module.Tree().grow()) == ("our 1", "grew 1")


@pytest.mark.parametrize("choice, on_drift", [("typo", "raise"), ("none", "typo")])
def test_a_wrong_word_changes_nothing(garden, choice, on_drift):
    engine = garden.engine(garden.patch(WATER))
    engine.apply("all", "warn")
    with pytest.raises(PatchError, match="typo"):
        engine.apply(choice, on_drift)
    assert garden.load().water(1) == "our 1"
    assert engine.on_drift == "warn"


@pytest.mark.parametrize("position", range(4))
def test_an_edit_that_fails_leaves_all_modules_as_they_were(garden, position):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    garden.write("user.py", "from garden import water\n")
    edits = [LOUDLY, DEPTH, Replace("shed:tool", "ours:bloom")]
    edits.insert(position, NOWHERE)
    owners = garden.load(), garden.load().Tree, garden.load().Bed, garden.load("shed"), garden.load("user")
    before = snapshot(*owners)
    engine = garden.engine(garden.patch(*edits))
    engine.apply("all", "skip")
    assert state(engine) == "refused"
    assert snapshot(*owners) == before


def test_a_failure_in_a_later_module_withdraws_the_patch_from_the_earlier_one(garden):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    engine = garden.applied(WATER, Replace("shed:tool", "ours:nowhere"))
    module = garden.load()
    assert module.water(1) == "our 1"
    for _ in range(2):
        with pytest.raises(PatchError, match=r"a-patch is refused.*shed.*nowhere"):
            garden.load("shed")
        assert "shed" not in sys.modules
        assert module.water(1) == "poured 1"
    assert state(engine) == "refused"


def test_a_failing_patch_does_not_take_others_along(garden):
    engine = garden.engine(garden.patch(WATER, id="good"), garden.patch(LOUDLY, NOWHERE, id="bad"))
    engine.apply("all", "skip")
    assert garden.load().water(1) == "our 1"
    assert (state(engine, 0), state(engine, 1)) == ("applied", "refused")


def test_a_target_whose_edit_failed_still_takes_the_next_patch_s(garden):
    engine = garden.engine(
        garden.patch(Wrap("garden:water", "ours:nowhere"), id="bad"), garden.patch(LOUDLY, id="good")
    )
    engine.apply("all", "skip")
    assert garden.load().water(1) == "poured 1!"
    assert (state(engine, 0), state(engine, 1)) == ("refused", "applied")


def test_a_module_that_arrives_after_the_revert_is_left_alone(garden):
    engine = garden.applied(WATER)
    engine.revert()
    assert garden.load().water(1) == "poured 1"
    assert state(engine) == "disabled"


def test_an_apply_that_raises_leaves_nothing_applied(garden):
    engine = garden.engine(garden.patch(WATER, id="good"), garden.patch(NOWHERE, id="bad"))
    module = garden.load()
    before = snapshot(module, module.Tree)
    with pytest.raises(PatchError, match="bad is refused"):
        engine.apply("all", "raise")
    assert snapshot(module, module.Tree) == before


@pytest.mark.parametrize("again", ["reload", "second import"])
def test_a_module_that_is_executed_anew_is_patched_anew(garden, again):
    engine = garden.applied(WATER, DEPTH)
    module = garden.load()
    if again == "reload":
        importlib.reload(module)
    else:
        del sys.modules["garden"]
    module = garden.load()
    assert (module.water(1), module.Bed().depth) == ("our 1", 7)
    engine.revert()
    assert module.water(1) == "poured 1" and not hasattr(module.Bed, "depth")


# -- patches that share targets ----------------------------------------------------------------------------------


def test_an_edit_that_two_patches_share_is_installed_once_and_leaves_with_the_last(garden):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    lost = Replace("shed:tool", "ours:nowhere")
    engine = garden.engine(garden.patch(LOUDLY, id="one"), garden.patch(LOUDLY, lost, id="two"))
    engine.apply("all", "skip")
    module = garden.load()
    assert module.water(1) == "poured 1!"
    garden.load("shed")
    assert (state(engine, 0), state(engine, 1)) == ("applied", "refused")
    assert module.water(1) == "poured 1!"
    engine.revert()
    assert module.water(1) == "poured 1"


@pytest.mark.parametrize("choice", ["one", "two"])
def test_each_of_two_patches_that_share_an_edit_brings_it_alone(garden, choice):
    engine = garden.engine(garden.patch(LOUDLY, id="one"), garden.patch(LOUDLY, id="two"))
    engine.apply(choice, "raise")
    assert garden.load().water(1) == "poured 1!"


def test_two_different_replacements_of_one_target_are_refused(garden):
    engine = garden.engine(
        garden.patch(WATER, id="one"), garden.patch(Replace("garden:water", "ours:bloom"), GROW, id="two")
    )
    engine.apply("all", "raise")
    with pytest.raises(PatchError, match=r"two is refused: garden:water is replaced by ours:water and by ours:bloom"):
        garden.load()


# -- other libraries that patch the same -------------------------------------------------------------------------

STRANGER = """
import functools
import garden
import wrapt

def _grow(self, by=1):
    return "stranger"

@functools.wraps(garden.Tree.grow)
def _around(self, by=1):
    return "stranger around " + _around.__wrapped__(self, by)

bare = _grow
wrapped = _around
partial = functools.partial(_grow, None)

@wrapt.decorator
def _decorate(wrapped, instance, args, kwargs):
    return "stranger around " + wrapped(*args, **kwargs)

class Callable:
    def __init__(self, function):
        functools.update_wrapper(self, function)

wrapt_decorated = _decorate(garden.Tree.grow)
instance = Callable(garden.Tree.grow)
"""


@pytest.mark.parametrize("kind", ["bare", "wrapped", "partial", "wrapt_decorated", "instance"])
def test_a_method_that_somebody_has_patched_is_not_replaced(garden, kind):
    garden.write("stranger.py", STRANGER)
    tree = garden.load().Tree
    tree.grow = theirs = getattr(garden.load("stranger"), kind)
    with pytest.raises(PatchError, match=r"garden:Tree.grow was already changed by (stranger|functools\.partial)"):
        garden.applied(GROW)
    assert vars(tree)["grow"] is theirs


def test_the_refusal_names_the_stranger_and_what_to_do(garden):
    garden.write("stranger.py", STRANGER)
    garden.load().Tree.grow = garden.load("stranger").bare
    with pytest.raises(PatchError, match=r"stranger \(.*stranger\.py\).*[Ii]mport .* before it.*leave out"):
        garden.applied(GROW)


def test_a_wrap_goes_around_a_decoration_but_not_around_a_foreign_body(garden):
    garden.write("stranger.py", STRANGER)
    tree, stranger = garden.load().Tree, garden.load("stranger")
    wrap = Wrap("garden:Tree.grow", "ours:loudly")
    tree.grow = stranger.wrapped
    garden.applied(wrap).revert()
    assert tree().grow() == "stranger around grew 1"
    tree.grow = stranger.bare
    with pytest.raises(PatchError, match="already changed by stranger"):
        garden.applied(wrap)
    garden.applied(Wrap("garden:Tree.grow", "ours:loudly", any_source=True))
    assert tree().grow() == "stranger!"


@pytest.mark.parametrize("target", ["garden:water", "garden:Tree.grow"])
def test_revert_says_that_somebody_patched_over_us_and_works_once_that_is_undone(garden, target):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    engine = garden.applied(Replace("shed:tool", "ours:bloom"), Wrap(target, "ours:loudly"))
    module, tool = garden.load(), garden.load("shed").tool
    owner, name = (module, "water") if target == "garden:water" else (module.Tree, "grow")
    mine = vars(owner)[name]
    setattr(owner, name, lambda *args: "theirs")
    with pytest.raises(PatchError, match=rf"{target} was changed by somebody else.*undo that first"):
        engine.revert()
    assert vars(owner)[name] is not mine, "theirs must stay"
    setattr(owner, name, mine)
    engine.revert()
    assert not hasattr(vars(owner)[name], "_self_wrapper")
    assert garden.load("shed").tool is not tool


def test_revert_says_that_somebody_patched_over_an_added_field(garden):
    engine = garden.applied(DEPTH)
    bed = garden.load().Bed
    mine = bed.__init__
    bed.__init__ = functools.wraps(mine)(lambda self, **kwargs: mine(self, **kwargs))
    with pytest.raises(PatchError, match=r"garden:Bed.__init__ was changed by somebody else"):
        engine.revert()
    bed.__init__ = mine
    engine.revert()
    assert not hasattr(bed, "depth")


def test_modules_with_odd_contents_do_not_disturb_rebinding(garden, monkeypatch):
    class Touchy(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("lazy")

    class Uncomparable:
        def __eq__(self, other):
            raise RuntimeError("do not compare")

    touchy = Touchy("touchy")
    touchy.thing = Uncomparable()
    monkeypatch.setitem(sys.modules, "touchy", touchy)
    monkeypatch.setitem(sys.modules, "nothing", None)
    garden.load()
    garden.applied(WATER, Export("garden:shower", "ours:water"))
    assert garden.load().water(1) == "our 1"


def test_a_module_that_a_finder_before_ours_served_is_caught_up_with(garden):
    engine = garden.engine(garden.patch(WATER))
    engine.apply("all", "raise")
    ours = next(finder for finder in sys.meta_path if type(finder).__module__.endswith("engine.watch"))
    sys.meta_path.remove(ours)  # what a finder that comes before ours, and finds the module, amounts to
    module = garden.load()
    assert module.water(1) == "poured 1"
    engine.catch_up()
    assert module.water(1) == "our 1"
    engine.catch_up()
    engine.revert()
    assert module.water(1) == "poured 1"


def test_a_module_that_is_still_being_imported_waits(garden):
    garden.write("field.py", "import early\n\ndef corn():\n    return 'corn'\n")
    garden.write("early.py", "from registry import engine\nengine.apply('all', 'raise')\n")
    garden.write("ours_too.py", "def corn():\n    return 'our corn'\n")
    engine = garden.engine(garden.patch(Replace("field:corn", "ours_too:corn")))
    registry = types.ModuleType("registry")
    registry.engine = engine
    sys.modules["registry"] = registry
    try:
        field = garden.load("field")
    finally:
        del sys.modules["registry"]
    assert field.corn() == "corn"
    engine.catch_up()
    assert field.corn() == "our corn"
