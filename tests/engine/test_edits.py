"""What each kind of edit does to its target, whichever is imported first, and that nothing of it stays."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest
from megatron_mtp_patches.engine import AddField, AddFlag, Edit, Export, PatchError, Replace, Wrap

WATER = Replace("garden:water", "ours:water")
GROW = Replace("garden:Tree.grow", "ours:grow")
TWICE = Wrap("garden:water", "ours:twice")
LOUDLY = Wrap("garden:water", "ours:loudly")
BLOOM = Export("garden:Tree.bloom", "ours:bloom")
FLAG = AddFlag("garden:make_parser", flag="--depth", type=int, default=3, help="How deep.")


def apply_around_import(garden, garden_first: bool, *edits: Edit):
    if garden_first:
        garden.load()
    engine = garden.applied(*edits)
    return engine, garden.load()


def parse(module, *words: str) -> argparse.Namespace:
    return module.make_parser(argparse.ArgumentParser()).parse_args(words)


def test_replace_puts_the_override_itself_in_the_place(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, WATER, GROW)
    ours = garden.load("ours")
    assert module.water is ours.water
    assert vars(module.Tree)["grow"] is ours.grow
    assert module.Tree().grow(by=2) == "our tree grew 2"


def test_a_method_called_on_the_class_is_a_method_of_what_it_is_given(garden, garden_first):
    """A namespace will do, as in tests that borrow methods; a static method has no such argument."""
    edits = Wrap("garden:Tree.grow", "ours:named"), Wrap("garden:Tree.species", "ours:named")
    _, module = apply_around_import(garden, garden_first, *edits)
    assert module.Tree.grow(module.Tree(), by=2) == "Tree grew 2"
    assert module.Tree.grow(argparse.Namespace(), 2) == "Namespace grew 2"
    assert module.Tree.species().endswith("oak")


def test_wrap_calls_the_original_through_the_wrapper(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, TWICE, Wrap("garden:Tree.grow", "ours:twice"))
    assert module.water(2) == "poured 2 twice"
    assert module.Tree().grow(by=2) == "grew 2 twice"
    assert module.water.__name__ == "water" and module.water.__doc__ == "Pour."


@pytest.mark.parametrize("name", ["species", "plant"])
def test_wrapped_static_and_class_methods_bind_as_before(garden, name):
    garden.applied(Wrap(f"garden:Tree.{name}", "ours:twice"))
    tree = garden.load().Tree
    before = {"species": "oak", "plant": str(tree)}[name]
    assert getattr(tree, name)() == getattr(tree(), name)() == f"{before} twice"


def test_wraps_stack_in_the_order_of_the_patches(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, TWICE, LOUDLY)
    assert module.water(1) == "poured 1 twice!"


def test_a_wrap_goes_around_a_replacement_that_comes_later(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, TWICE, WATER)
    assert module.water(1) == "our 1 twice"


def test_export_adds_a_name_that_is_missing(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, BLOOM, Export("garden:shower", "ours:water"))
    assert module.Tree().bloom() == "bloomed"
    assert module.shower is garden.load("ours").water


def test_export_leaves_a_name_that_exists_alone(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, Export("garden:Tree.grow", "ours:grow"))
    assert module.Tree().grow() == "grew 1"


def test_flag_has_its_default_type_and_help(garden, garden_first):
    _, module = apply_around_import(garden, garden_first, FLAG)
    assert parse(module).depth == 3
    assert parse(module, "--depth", "5").depth == 5
    assert parse(module, "--seed", "4").seed == 4
    assert "How deep." in module.make_parser(argparse.ArgumentParser()).format_help()


def test_a_flag_that_the_library_has_stays_the_library_s(garden):
    garden.applied(AddFlag("garden:make_parser", flag="--seed", type=str, default="ours", help=""))
    assert parse(garden.load()).seed == 1


PLAIN = ["poured 1", "grew 1", {"seed": 1}, False]


def behave(module) -> list:
    return [module.water(1), module.Tree().grow(), vars(parse(module)), hasattr(module.Tree, "bloom")]


@pytest.mark.parametrize("edit", [WATER, GROW, TWICE, BLOOM, FLAG], ids=lambda edit: type(edit).__name__)
def test_apply_revert_apply_is_the_identity(garden, garden_first, edit):
    if garden_first:
        module = garden.load()
        before = dict(vars(module)), dict(vars(module.Tree))
    engine, module = apply_around_import(garden, garden_first, edit)
    applied = behave(module)
    assert applied != PLAIN
    assert engine.installer.report(engine.catalog[0]).targets == {edit.target: "applied"}

    engine.revert()
    reverted = dict(vars(module)), dict(vars(module.Tree))
    if garden_first:
        assert_same_objects(before, reverted)
    assert behave(module) == PLAIN

    engine.apply("all", "raise")
    assert behave(module) == applied
    engine.revert()
    assert_same_objects(reverted, (dict(vars(module)), dict(vars(module.Tree))))


def assert_same_objects(before: tuple[dict, ...], after: tuple[dict, ...]) -> None:
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert [name for name in old if old[name] is not new[name] and name != "__builtins__"] == []


@pytest.mark.parametrize("edit", [WATER, TWICE], ids=["Replace", "Wrap"])
def test_copies_made_by_from_import_are_rebound_and_restored(garden, edit):
    garden.write("user.py", "from garden import water\nfrom garden import water as pour\n")
    original, early = garden.load().water, garden.load("user")
    engine = garden.applied(edit)
    patched = garden.load().water
    assert patched is not original
    assert early.water is early.pour is patched
    garden.write("late_user.py", "from garden import water\n")
    late = garden.load("late_user")
    assert late.water is patched
    engine.revert()
    assert early.water is early.pour is late.water is garden.load().water is original


def test_a_wrapped_function_pickles_by_name(garden):
    garden.applied(TWICE)
    water = garden.load().water
    assert pickle.loads(pickle.dumps(water)) is water
    assert b"twice" not in pickle.dumps(water)


def test_a_wrapped_function_is_copied_as_a_function_is_not_at_all(garden):
    garden.applied(TWICE)
    water = garden.load().water
    assert copy.copy(water) is water
    assert copy.deepcopy({"call": water})["call"] is water


def test_an_edit_of_a_kind_that_does_not_fit_is_refused(garden):
    with pytest.raises(PatchError, match="a-patch is refused"):
        garden.applied(AddField("garden:water", field="x", type=int, default=1, doc=""))
        garden.load()


def test_an_override_that_does_not_exist_is_refused_by_name(garden):
    garden.load()
    with pytest.raises(PatchError, match="a-patch is refused.*nowhere"):
        garden.applied(Replace("garden:water", "ours:nowhere"))


def test_a_replaced_and_wrapped_function_survives_revert_and_apply(garden):
    engine = garden.applied(WATER, TWICE)
    module, ours = garden.load(), garden.load("ours")
    override = ours.water
    for _ in range(2):
        assert module.water(1) == "our 1 twice"
        engine.revert()
        assert module.water(1) == "poured 1"
        assert ours.water is override, "the override's own module keeps it"
        engine.apply("all", "raise")
