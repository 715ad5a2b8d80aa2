"""What each kind of edit does to its target, whichever is imported first, and that nothing of it stays."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest
from megatron_mtp_patches.engine import AddField, AddFlag, Edit, Override, PatchError, Wrap

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Override("lib:C.method", "overrides:method")
SUFFIX = Wrap("lib:f", "overrides:add_suffix")
MARK = Wrap("lib:f", "overrides:add_mark")
ADD_METHOD = Override("lib:C.new_method", "overrides:new_method", where="missing")
FLAG = AddFlag("lib:make_parser", flag="--depth", type=int, default=3, help="How deep.")


def apply_around_import(library, imported_first: bool, *edits: Edit):
    if imported_first:
        library.load()
    engine = library.applied(*edits)
    return engine, library.load()


def parse(module, *words: str) -> argparse.Namespace:
    return module.make_parser(argparse.ArgumentParser()).parse_args(words)


def test_a_wrapped_method_called_on_the_class_takes_any_instance(library, imported_first):
    """A namespace will do, as in tests that borrow methods; a static method has no such argument."""
    edits = Wrap("lib:C.method", "overrides:add_type_name"), Wrap("lib:C.static", "overrides:add_type_name")
    _, module = apply_around_import(library, imported_first, *edits)
    assert module.C.method(module.C(), by=2) == "C method 2"
    assert module.C.method(argparse.Namespace(), 2) == "Namespace method 2"
    assert module.C.static().endswith("static")


@pytest.mark.parametrize("name", ["static", "class_method"])
def test_wrapped_static_and_class_methods_bind_as_before(library, name):
    library.applied(Wrap(f"lib:C.{name}", "overrides:add_suffix"))
    cls = library.load().C
    before = {"static": "static", "class_method": str(cls)}[name]
    assert getattr(cls, name)() == getattr(cls(), name)() == f"{before} suffix"


def test_wraps_stack_in_the_order_of_the_patches(library, imported_first):
    _, module = apply_around_import(library, imported_first, SUFFIX, MARK)
    assert module.f(1) == "original 1 suffix!"


def test_provide_adds_what_is_missing_and_replaces_what_exists(library, imported_first):
    edits = (
        Override("lib:C.method", "overrides:method", where="everywhere"),
        Override("lib:C.new_method", "overrides:new_method", where="everywhere"),
    )
    engine, module = apply_around_import(library, imported_first, *edits)
    assert (module.C().method(), module.C().new_method()) == ("override method 1", "new")
    assert set(engine.report(engine.catalog[0]).targets.values()) == {"applied"}
    engine.revert()
    assert (module.C().method(), hasattr(module.C, "new_method")) == ("method 1", False)


def test_an_added_flag_has_its_default_type_and_help(library, imported_first):
    _, module = apply_around_import(library, imported_first, FLAG)
    assert parse(module).depth == 3
    assert parse(module, "--depth", "5").depth == 5
    assert parse(module, "--seed", "4").seed == 4
    assert "How deep." in module.make_parser(argparse.ArgumentParser()).format_help()


def test_a_flag_that_exists_is_left_alone(library):
    library.applied(AddFlag("lib:make_parser", flag="--seed", type=str, default="overrides", help=""))
    assert parse(library.load()).seed == 1


PLAIN = ["original 1", "method 1", {"seed": 1}, False]


def behave(module) -> list:
    return [module.f(1), module.C().method(), vars(parse(module)), hasattr(module.C, "new_method")]


PROVIDE = Override("lib:f", "overrides:f", where="everywhere")


@pytest.mark.parametrize(
    "edit", [REPLACE_F, METHOD, PROVIDE, SUFFIX, ADD_METHOD, FLAG], ids=lambda edit: type(edit).__name__
)
def test_apply_revert_apply_is_the_identity(library, imported_first, edit):
    if imported_first:
        module = library.load()
        before = dict(vars(module)), dict(vars(module.C))
    engine, module = apply_around_import(library, imported_first, edit)
    applied = behave(module)
    assert applied != PLAIN
    assert engine.report(engine.catalog[0]).targets == {edit.target: "applied"}

    engine.revert()
    reverted = dict(vars(module)), dict(vars(module.C))
    if imported_first:
        assert_same_objects(before, reverted)
    assert behave(module) == PLAIN

    engine.apply("all", "raise")
    assert behave(module) == applied
    engine.revert()
    assert_same_objects(reverted, (dict(vars(module)), dict(vars(module.C))))


def assert_same_objects(before: tuple[dict, ...], after: tuple[dict, ...]) -> None:
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert [name for name in old if old[name] is not new[name] and name != "__builtins__"] == []


def test_a_wrapped_function_pickles_by_name_and_its_copy_is_itself(library):
    library.applied(SUFFIX)
    f = library.load().f
    assert f.__doc__ == "Docstring."
    assert pickle.loads(pickle.dumps(f)) is copy.copy(f) is copy.deepcopy({"call": f})["call"] is f
    assert b"suffix" not in pickle.dumps(f)


METHODS = ["method", "static", "class_method"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
@pytest.mark.parametrize("name", METHODS)
def test_an_object_that_keeps_its_wrapped_method_can_be_copied_and_pickled(library, copied, name):
    """As models of verl keep the `_postprocess` that they replace."""
    library.applied(Wrap(f"lib:C.{name}", "overrides:add_suffix"))
    kept = library.load().C()
    kept.backup = getattr(kept, name)
    new = copied(kept)
    assert new is not kept
    assert new.backup() == kept.backup() == getattr(kept, name)()
    assert "suffix" in new.backup()
    if name == "method":
        assert new.backup.__self__ is new


@pytest.mark.parametrize("name", METHODS)
def test_a_wrapped_method_looked_up_on_its_class_can_be_copied_and_pickled(library, name):
    library.applied(Wrap(f"lib:C.{name}", "overrides:add_suffix"))
    library_class = library.load().C
    method = getattr(library_class, name)
    arguments = [library_class()] if name == "method" else []
    for new in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert new(*arguments) == method(*arguments)
        assert "suffix" in new(*arguments)


def test_a_wrapped_method_looked_up_in_a_class_is_one_object(library):
    """nvidia-modelopt compares `Model.forward` with that of a base class to see whether it is inherited."""
    library.applied(Wrap("lib:C.method", "overrides:add_suffix"), Wrap("lib:C.method", "overrides:add_suffix"))
    base = library.load().C
    inherits, overrides = type("Inherits", (base,), {}), type("Overrides", (base,), {"method": lambda self: "own"})
    assert base.method is base.method is inherits.method is not overrides.method
    assert inherits().method() == inherits.method(inherits()) and "suffix" in inherits().method()


def test_an_edit_that_does_not_fit_its_target_is_refused(library):
    with pytest.raises(PatchError, match="a-patch is refused"):
        library.applied(AddField("lib:f", field="x", type=int, default=1, doc=""))
        library.load()


@pytest.mark.parametrize("edits", [(REPLACE_F, SUFFIX), (SUFFIX, REPLACE_F)], ids=["wrapped later", "wrapped before"])
def test_a_replaced_and_wrapped_function_survives_revert_and_apply(library, edits):
    engine = library.applied(*edits)
    module, overrides = library.load(), library.load("overrides")
    override = overrides.f
    for _ in range(2):
        assert module.f(1) == "override 1 suffix"
        engine.revert()
        assert module.f(1) == "original 1"
        assert overrides.f is override, "the override's own module keeps it"
        engine.apply("all", "raise")
