"""The values with which the conformance tests try the fields that patches add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import pytest
from megatron_mtp_patches.engine import AddField

from .inspection import VALUES, choose_value

pytestmark = pytest.mark.forked("python")


@pytest.mark.parametrize(
    "annotation, default, value",
    [
        (int, 0, 1),
        (int, 1, 3),
        (int | None, None, 1),
        (bool, False, True),
        (bool, True, False),
        (float, float("inf"), 0.5),
        (float | None, None, 0.5),
        (Optional[float], 0.5, 0.25),  # noqa: UP045 - as Megatron's own fields have it
        (str, "", "1"),
    ],
)
def test_a_value_has_the_type_of_the_field_and_is_not_its_default(annotation, default, value):
    actual = choose_value(AddField("module:Class", "a_field", annotation, default, ""))
    assert (actual, type(actual)) == (value, type(value))


def test_a_field_can_have_a_value_that_no_type_tells(monkeypatch):
    edit = AddField("module:Class", "a_field", Callable | None, None, "")
    with pytest.raises(AssertionError, match=r"give a_field .* a value in VALUES of .*inspection\.py"):
        choose_value(edit)
    monkeypatch.setitem(VALUES, "a_field", print)
    assert choose_value(edit) is print
