"""What fails half-way leaves nothing half done: an edit, a patch, a revert."""

from __future__ import annotations

import functools

import pytest
from megatron_mtp_patches.engine import AddField, Override, PatchError, Wrap

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Wrap("lib:C.method", "overrides:add_mark")
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")
HEIGHT = AddField("lib:Config", field="height", type=int, default=3, doc="")


def cover_function(module):
    module.f = functools.wraps(module.f)(lambda *args: "theirs")


def cover_method(module):
    module.C.method = lambda self: "theirs"


def cover_constructor(module):
    mine = module.Config.__init__
    module.Config.__init__ = functools.wraps(mine)(lambda self, **kwargs: mine(self, **kwargs))


@pytest.mark.parametrize(
    "cover, place",
    [(cover_function, "lib:f"), (cover_method, "lib:C.method"), (cover_constructor, "lib:Config.__init__")],
)
def test_revert_changes_nothing_where_another_library_patched_after_us(library, cover, place):
    engine = library.applied(REPLACE_F, METHOD, DEPTH, HEIGHT, Override("lib2:g", "overrides:new_method"))
    module = library.load()
    originals = library.snapshot()
    cover(module)
    covered = library.snapshot()
    report = engine.report(engine.catalog[0])
    assert report.state == "applied"
    changed = [
        target for target, state in report.targets.items() if state == "applied, then changed by another library"
    ]
    assert changed == [place.removesuffix(".__init__")]
    for _ in range(2):
        with pytest.raises(PatchError, match=rf"^{place} was changed by another library.*undo that first"):
            engine.revert()
    assert library.snapshot() == covered
    assert library.load("lib2").g(1) == "new", "the patch is not half reverted: what is still to come is patched"
    for owner, old in zip((module, module.C, module.Config), originals, strict=False):
        for name, value in old.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)
    engine.revert()
    assert (module.f(1), module.C().method(), hasattr(module.Config, "depth")) == ("original 1", "method 1", False)


def test_revert_ignores_changes_of_what_a_patch_left_alone(library):
    engine = library.applied(Override("lib:f", "overrides:f", where="missing"), METHOD)
    module = library.load()
    module.f = theirs = lambda x: "theirs"
    engine.revert()
    assert module.f is theirs
    assert module.C().method() == "method 1"


def test_a_refusal_names_what_cannot_be_undone_because_of_another_library(library):
    engine = library.applied(REPLACE_F, METHOD, Override("lib2:g", "overrides:nowhere"))
    module = library.load()
    mine = vars(module.C)["method"]
    cover_method(module)
    with pytest.raises(PatchError, match=r"(?s)a-patch is refused: .*nowhere.*lib:C.method was changed by another"):
        library.load("lib2")
    assert module.f(1) == "original 1", "the rest of the patch is withdrawn"
    module.C.method = mine
    engine.revert()
    assert module.C().method() == "method 1"


def test_a_field_that_a_subclass_cannot_take_is_removed_again(library):
    module = library.load()

    def __init__(self):
        pass

    __init__.__signature__ = "none to speak of"
    odd = type(
        "Odd", (module.Config,), {"__init__": __init__, "__dataclass_fields__": module.Config.__dataclass_fields__}
    )
    before = library.snapshot()
    engine = library.engine(library.patch(DEPTH))
    engine.apply("all", "skip")
    assert engine.report(engine.catalog[0]).state == "refused"
    assert library.snapshot() == before and vars(odd)["__init__"] is __init__
