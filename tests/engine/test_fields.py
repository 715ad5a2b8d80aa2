"""Fields added to a dataclass behave as if they had been declared there."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest
from megatron_mtp_patches.engine import AddField

DEPTH = AddField("garden:Bed", field="depth", type=int, default=7, doc="How deep.")
COLOUR = AddField("garden:Bed", field="colour", type=str, default="brown", doc="Which colour.")

SUBCLASSES = """
from dataclasses import dataclass, field
from garden import Bed

@dataclass
class Raised(Bed):
    height: int = 2

@dataclass
class Walled(Raised):
    wall: list = field(default_factory=list)

class Plain(Bed):
    def __init__(self, width):
        super().__init__(width=width, depth=8)

class Early(Bed):
    def __init__(self, width):
        self.depth = 9
        super().__init__(width=width)
"""


@pytest.fixture
def bed(garden) -> type:
    garden.applied(DEPTH)
    return garden.load().Bed


def test_construction(bed):
    assert bed().depth == 7
    assert (bed(depth=2).depth, bed(3, depth=2).width) == (2, 3)
    with pytest.raises(TypeError):
        bed(1, 2)
    with pytest.raises(TypeError):
        bed(dept=2)


def test_fields_replace_asdict_and_signature_know_it(bed):
    field = {field.name: field for field in dataclasses.fields(bed)}["depth"]
    assert (field.type, field.default, field.kw_only) == (int, 7, True)
    assert field.metadata["argparse_meta"]["help"] == "How deep."
    made = dataclasses.replace(bed(width=4, depth=2), width=5)
    assert dataclasses.asdict(made) == {"width": 5, "depth": 2}
    assert dataclasses.replace(made, depth=3).depth == 3
    parameter = inspect.signature(bed).parameters["depth"]
    assert (parameter.kind, parameter.default, parameter.annotation) == (parameter.KEYWORD_ONLY, 7, int)
    assert bed.depth == 7


def test_instances_pickle(bed):
    assert pickle.loads(pickle.dumps(bed(depth=2))).depth == 2


def test_post_init_sees_the_value(bed):
    assert (bed().seen, bed(depth=2).seen) == (7, 2)


def test_instances_made_before_have_the_default(garden):
    early = garden.load().Bed()
    garden.applied(DEPTH)
    assert early.depth == 7
    assert dataclasses.asdict(early) == {"width": 1, "depth": 7}


@pytest.mark.parametrize("subclasses_first", [True, False], ids=["existing subclasses", "later subclasses"])
def test_subclasses_have_it_too(garden, subclasses_first):
    garden.write("beds.py", SUBCLASSES)
    if subclasses_first:
        garden.load("beds")
    garden.applied(DEPTH)
    beds = garden.load("beds")
    walled = beds.Walled(5, height=3, depth=2, wall=[1])
    assert (walled.width, walled.height, walled.depth, walled.wall, walled.seen) == (5, 3, 2, [1], 2)
    assert (beds.Walled().depth, beds.Raised().seen) == (7, 7)
    assert dataclasses.asdict(dataclasses.replace(walled, width=6))["depth"] == 2
    assert "depth" in inspect.signature(beds.Raised).parameters
    plain = beds.Plain(4)
    assert (plain.depth, plain.seen) == (8, 8)
    early = beds.Early(4)
    assert (early.depth, early.seen) == (9, 9), "what a subclass set before is kept"


def test_revert_leaves_no_trace(garden):
    garden.write("beds.py", SUBCLASSES)
    beds, bed = garden.load("beds"), garden.load().Bed
    classes = (bed, beds.Raised, beds.Walled, beds.Plain)
    before = [(dict(vars(cls)), dict(cls.__dataclass_fields__)) for cls in classes]
    engine = garden.applied(DEPTH, COLOUR)
    assert beds.Walled(depth=1, colour="red").colour == "red"
    engine.revert()
    for cls, (names, fields) in zip(classes, before, strict=True):
        assert dict(vars(cls)) == names
        assert vars(cls).get("__init__") is names.get("__init__")
        assert cls.__dataclass_fields__ == fields
    with pytest.raises(TypeError):
        bed(depth=1)
    engine.apply("all", "raise")
    assert bed(depth=1, colour="red").seen == 1


@pytest.mark.parametrize("first, second", [(DEPTH, COLOUR), (COLOUR, DEPTH)], ids=["depth first", "colour first"])
def test_two_fields_of_one_class_leave_in_either_order(garden, first, second):
    from megatron_mtp_patches.engine.fields import Fields

    bed = garden.load().Bed
    original = bed.__init__
    fields = Fields()
    fields.add(bed, DEPTH)
    fields.add(bed, COLOUR)
    assert dataclasses.asdict(bed(depth=2, colour="red")) == {"width": 1, "depth": 2, "colour": "red"}
    fields.remove(first)
    kept = {second.field: second.default}
    assert dataclasses.asdict(bed(**kept)) == {"width": 1, **kept}
    assert not hasattr(bed, first.field)
    with pytest.raises(TypeError):
        bed(**{first.field: first.default})
    fields.remove(second)
    assert bed.__init__ is original
    assert [field.name for field in dataclasses.fields(bed)] == ["width"]


def test_a_field_that_the_class_has_stays_the_class_s(garden):
    garden.edit("garden.py", "width: int = 1", "width: int = 1\n    depth: int = 4")
    bed = garden.load().Bed
    original = bed.__init__
    engine = garden.applied(DEPTH)
    assert bed.__init__ is original and bed().depth == bed.depth == 4
    engine.revert()
    assert bed(2, 3).depth == 3 and bed.depth == 4
    assert [field.default for field in dataclasses.fields(bed)] == [1, 4]


def test_a_subclass_keeps_its_own_field_of_that_name(garden):
    garden.write(
        "own.py",
        """
        from dataclasses import dataclass
        from garden import Bed

        @dataclass
        class Deep(Bed):
            depth: int = 99
        """,
    )
    deep = garden.load("own").Deep
    field = deep.__dataclass_fields__["depth"]
    engine = garden.applied(DEPTH)
    assert (deep().depth, deep(1, 5).depth) == (99, 5)
    engine.revert()
    assert deep.__dataclass_fields__["depth"] is field
    assert dataclasses.asdict(deep()) == {"width": 1, "depth": 99}


def test_fields_of_a_class_and_of_its_base_leave_in_any_order(garden):
    garden.write(
        "own.py", "from dataclasses import dataclass\nfrom garden import Bed\n@dataclass\nclass Low(Bed): pass\n"
    )
    low_field = AddField("own:Low", field="slope", type=int, default=2, doc="")
    bed, low = garden.load().Bed, garden.load("own").Low
    before = dict(vars(bed)), dict(vars(low))
    base, sub = garden.patch(DEPTH, id="base"), garden.patch(low_field, id="sub")
    engine = garden.engine(base, sub)
    engine.apply("all", "raise")
    assert (low(depth=1, slope=5).slope, low().depth, bed(depth=1).depth) == (5, 7, 1)
    engine.installer._withdraw(base)
    assert low(slope=5).slope == 5 and not hasattr(low, "depth")
    with pytest.raises(TypeError):
        low(depth=1)
    engine.revert()
    assert (dict(vars(bed)), dict(vars(low))) == before
