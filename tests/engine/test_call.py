"""What a wrapper can ask of a call, and change in it."""

from __future__ import annotations

from types import MethodType

import pytest
from megatron_mtp_patches.engine import Wrap
from megatron_mtp_patches.engine.call import Call


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def add(self, first, second=2, *, third=3):
        return self.scale * (first + second + third)


@pytest.fixture
def call():
    """call(*args, **kwargs): that of `add` of an object with the scale 10."""
    return lambda *args, **kwargs: Call(Scaled(10).add, None, args, kwargs)


@pytest.mark.parametrize(
    "args, kwargs", [((1, 5), {"third": 7}), ((), {"first": 1, "second": 5, "third": 7})], ids=["mixed", "by name"]
)
def test_arguments_have_names_however_the_caller_gave_them(call, args, kwargs):
    one = call(*args, **kwargs)
    assert [one[name] for name in ("first", "second", "third")] == [1, 5, 7]
    assert one.proceed() == 130


def test_what_the_caller_leaves_out_has_its_default(call):
    assert (call(1)["second"], call(1).get("third")) == (2, 3)


def test_a_parameter_that_the_function_lacks_is_a_key_error_or_a_default(call):
    assert (call(1).get("fourth"), call(1).get("fourth", 4)) == (None, 4)
    with pytest.raises(KeyError):
        call(1)["fourth"]
    with pytest.raises(KeyError):
        call(1)["fourth"] = 4


def test_the_function_gets_what_the_wrapper_has_changed(call):
    one = call(1)
    one["second"], one["third"] = 20, one["third"] + 1
    assert one.proceed() == 250


def test_what_is_dropped_before_an_argument_is_asked_by_name_does_not_reach_the_function(call):
    one = call(1, fourth=4)
    assert one.kwargs.pop("fourth") == 4
    assert (one["first"], one.proceed()) == (1, 60)


def test_the_method_of_another_object_can_run_instead(call):
    one = call(1)
    assert one.proceed(Scaled(100)) == 600
    one["first"] = 2
    assert one.proceed(Scaled(100)) == 700


def test_the_method_of_another_object_has_its_other_wrappers(library):
    library.write(
        "overrides_twice.py",
        """
        import copy

        def rename(call):
            other = copy.copy(call.instance)
            other.name = "copy"
            return call.proceed(other)

        def add_name(call):
            return call.proceed() + call.instance.name
        """,
    )
    library.applied(Wrap("lib:C.method", "overrides_twice:add_name"), Wrap("lib:C.method", "overrides_twice:rename"))
    one = library.load().C()
    one.name = "one"
    assert one.method() == "method 1copy"


def test_a_bound_method_has_no_parameter_for_its_object():
    assert list(Call(MethodType(Scaled.add, Scaled(1)), None, (), {}).parameters) == ["first", "second", "third"]


def test_arguments_that_do_not_fit_are_a_type_error(call):
    with pytest.raises(TypeError):
        call(1, fourth=4)["first"]
