"""Fields added to a dataclass behave as if they had been declared there."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest
from megatron_mtp_patches.engine import AddField
from megatron_mtp_patches.engine.added_fields import AddedFields

DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="How deep.")
COLOUR = AddField("lib:Config", field="colour", type=str, default="brown", doc="Which colour.")

SUBCLASSES = """
from dataclasses import dataclass, field
from lib import Config

@dataclass
class Child(Config):
    height: int = 2

@dataclass
class Grandchild(Child):
    items: list = field(default_factory=list)

class WithInit(Config):
    def __init__(self, width):
        super().__init__(width=width, depth=8)

class SetsFieldFirst(Config):
    def __init__(self, width):
        self.depth = 9
        super().__init__(width=width)
"""


@pytest.fixture
def config(library) -> type:
    library.applied(DEPTH)
    return library.load().Config


def test_the_constructor_takes_the_field_as_a_keyword(config):
    assert config().depth == 7
    assert (config(depth=2).depth, config(3, depth=2).width) == (2, 3)
    with pytest.raises(TypeError):
        config(1, 2)
    with pytest.raises(TypeError):
        config(dept=2)


def test_a_native_field_carries_the_setting_until_it_is_reverted(library):
    native = AddField("lib:Config", field="width", type=int, default=1, doc="How wide.", setting="checks of width")
    engine = library.applied(native)
    field = library.load().Config.__dataclass_fields__["width"]
    assert dict(field.metadata) == {"setting": "checks of width"}
    engine.revert()
    assert dict(field.metadata) == {}


def test_a_new_field_gets_the_metadata_of_its_setting(library):
    class Height:
        field_metadata = {"help": "How tall."}

    library.applied(AddField("lib:Config", field="height", type=int, default=1, doc="", setting=Height))
    field = library.load().Config.__dataclass_fields__["height"]
    assert dict(field.metadata) == {"added_in_place": True, "help": "How tall.", "setting": Height}


def test_type_hints_include_the_field_until_it_is_removed(library):
    """transformers makes a parser of them."""
    created = library.applied(DEPTH)
    config = library.load().Config
    assert typing.get_type_hints(config) == {"width": int, "depth": int}
    created.revert()
    assert typing.get_type_hints(config) == {"width": int}


def test_fields_replace_asdict_and_signature_include_the_field(config):
    field = {field.name: field for field in dataclasses.fields(config)}["depth"]
    assert (field.type, field.default, field.kw_only) == (int, 7, True)
    assert dict(field.metadata) == {"added_in_place": True}
    created = dataclasses.replace(config(width=4, depth=2), width=5)
    assert dataclasses.asdict(created) == {"width": 5, "depth": 2}
    assert dataclasses.replace(created, depth=3).depth == 3
    parameter = inspect.signature(config).parameters["depth"]
    assert (parameter.kind, parameter.default, parameter.annotation) == (parameter.KEYWORD_ONLY, 7, int)
    assert config.depth == 7


def test_older_instances_have_the_default(library):
    early = library.load().Config()
    library.applied(DEPTH)
    assert early.depth == 7
    assert dataclasses.asdict(early) == {"width": 1, "depth": 7}


@pytest.mark.parametrize("subclasses_first", [True, False], ids=["existing subclasses", "later subclasses"])
def test_subclasses_have_the_field_too(library, subclasses_first):
    library.write("configs.py", SUBCLASSES)
    if subclasses_first:
        library.load("configs")
    library.applied(DEPTH)
    configs = library.load("configs")
    grandchild = configs.Grandchild(5, height=3, depth=2, items=[1])
    assert (grandchild.width, grandchild.height, grandchild.depth, grandchild.items, grandchild.seen) == (
        5,
        3,
        2,
        [1],
        2,
    )
    assert (configs.Grandchild().depth, configs.Child().seen) == (7, 7)
    assert dataclasses.asdict(dataclasses.replace(grandchild, width=6))["depth"] == 2
    assert "depth" in inspect.signature(configs.Child).parameters
    plain = configs.WithInit(4)
    assert (plain.depth, plain.seen) == (8, 8)
    early = configs.SetsFieldFirst(4)
    assert (early.depth, early.seen) == (9, 9), "what a subclass set before is kept"


def test_revert_restores_the_class_and_its_subclasses(library):
    library.write("configs.py", SUBCLASSES)
    configs, config = library.load("configs"), library.load().Config
    classes = (config, configs.Child, configs.Grandchild, configs.WithInit)
    before = [(dict(vars(cls)), dict(cls.__dataclass_fields__)) for cls in classes]
    engine = library.applied(DEPTH, COLOUR)
    assert configs.Grandchild(depth=1, colour="red").colour == "red"
    engine.revert()
    for cls, (names, fields) in zip(classes, before, strict=True):
        assert dict(vars(cls)) == names
        assert vars(cls).get("__init__") is names.get("__init__")
        assert cls.__dataclass_fields__ == fields
    with pytest.raises(TypeError):
        config(depth=1)
    engine.apply("all", "raise")
    assert config(depth=1, colour="red").seen == 1


def test_a_field_that_exists_is_left_alone(library):
    library.edit("lib.py", "width: int = 1", "width: int = 1\n    depth: int = 4")
    config = library.load().Config
    original = config.__init__
    engine = library.applied(DEPTH)
    assert config.__init__ is original and config().depth == config.depth == 4
    engine.revert()
    assert config(2, 3).depth == 3 and config.depth == 4
    assert [field.default for field in dataclasses.fields(config)] == [1, 4]


def test_a_subclass_keeps_its_own_field_of_that_name(library):
    library.write(
        "own.py",
        """
        from dataclasses import dataclass
        from lib import Config

        @dataclass
        class Deep(Config):
            depth: int = 99
        """,
    )
    deep = library.load("own").Deep
    field = deep.__dataclass_fields__["depth"]
    engine = library.applied(DEPTH)
    assert (deep().depth, deep(1, 5).depth) == (99, 5)
    engine.revert()
    assert deep.__dataclass_fields__["depth"] is field
    assert dataclasses.asdict(deep()) == {"width": 1, "depth": 99}


def test_fields_of_a_class_and_of_its_base_can_be_removed_in_any_order(library):
    library.write(
        "own.py", "from dataclasses import dataclass\nfrom lib import Config\n@dataclass\nclass Low(Config): pass\n"
    )
    low_field = AddField("own:Low", field="slope", type=int, default=2, doc="")
    config, low = library.load().Config, library.load("own").Low
    before = dict(vars(config)), dict(vars(low))
    fields = AddedFields()
    fields.add(config, DEPTH)
    fields.add(low, low_field)
    assert (low(depth=1, slope=5).slope, low().depth, config(depth=1).depth) == (5, 7, 1)
    fields.remove(DEPTH)
    assert low(slope=5).slope == 5 and not hasattr(low, "depth")
    with pytest.raises(TypeError):
        low(depth=1)
    fields.remove(low_field)
    assert (dict(vars(config)), dict(vars(low))) == before
