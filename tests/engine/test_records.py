"""`record` makes of a class what dataclass(frozen=True) would."""

import dataclasses

import pytest
from megatron_mtp_patches.engine.records import record


def declare(kind):
    @kind
    class Edit:
        target: str
        checks = True

    @kind
    class Wrap(Edit):
        wrapper: str
        checks: bool = True
        names: tuple = ()

    return Wrap


@pytest.fixture(params=[record, dataclasses.dataclass(frozen=True)], ids=["record", "dataclass"])
def wrap(request):
    return declare(request.param)


def test_values_are_given_by_place_or_by_name_and_have_defaults(wrap):
    one = wrap("a", wrapper="b", names=("c",))
    assert (one.target, one.wrapper, one.checks, one.names) == ("a", "b", True, ("c",))
    assert wrap.__match_args__ == ("target", "wrapper", "checks", "names")


@pytest.mark.parametrize(
    "args, kwargs", [((), {}), (("a",), {}), (("a", "b"), {"wrapper": "c"}), (("a", "b"), {"d": 1})]
)
def test_what_is_missing_given_twice_or_unknown_is_an_error(wrap, args, kwargs):
    with pytest.raises(TypeError):
        wrap(*args, **kwargs)


def test_equal_values_are_equal_and_one_key(wrap):
    assert wrap("a", "b") == wrap("a", wrapper="b") != wrap("a", "c")
    assert len({wrap("a", "b"), wrap("a", "b"), wrap("a", "c")}) == 2


def test_it_does_not_change_but_has_altered_copies(wrap):
    one = wrap("a", "b")
    with pytest.raises(AttributeError):
        one.target = "c"
    changed = one.__replace__(target="c") if hasattr(one, "__replace__") else dataclasses.replace(one, target="c")
    assert changed == wrap("c", "b") and one.target == "a"


def test_its_text_has_its_values(wrap):
    assert "wrapper='b'" in repr(wrap("a", "b"))


def test_records_that_compare_by_identity():
    @record(eq=False)
    class Setting:
        name: str

    assert Setting("a") != Setting("a")
