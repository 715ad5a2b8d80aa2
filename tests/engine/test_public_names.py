"""What a user may import is documented, and typed."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
from megatron_mtp_patches import engine, functional

NAMES = [(module, name) for module in (megatron_mtp_patches, engine, functional) for name in module.__all__]
PUBLIC = {getattr(module, name) for module, name in NAMES}
FUNCTIONS = sorted(filter(inspect.isfunction, PUBLIC), key=lambda function: function.__name__)
CLASSES = sorted(filter(inspect.isclass, PUBLIC), key=lambda cls: cls.__name__)


def described(documented: object, heading: str) -> dict[str, str]:
    """{name: what is said of it} under `heading` in the docstring."""
    _, _, section = inspect.cleandoc(documented.__doc__).partition(f"\n{heading}:\n")
    return dict(re.findall(r"^    (\w+): (\S.*)$", section.partition("\n\n")[0], flags=re.MULTILINE))


def test_the_public_names_are_these():
    """What is added here is kept: see docs/versioning.md."""
    classes, functions = (
        ["Finding", "Patch", "PatchError", "Report"],
        ["apply", "diagnose", "metrics", "mtp_pass", "record", "revert", "status", "verify"],
    )
    assert megatron_mtp_patches.__all__ == classes + functions
    assert all(hasattr(module, name) for module, name in NAMES)
    assert set(FUNCTIONS) | set(CLASSES) == PUBLIC
    with pytest.raises(ImportError, match="no_such_name"):
        from megatron_mtp_patches import no_such_name  # noqa: F401


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_is_documented_and_typed(function):
    assert function.__doc__
    names = list(inspect.signature(function).parameters)
    assert list(described(function, "Args")) == names
    types = {name: getattr(megatron_mtp_patches, name) for name in megatron_mtp_patches.__all__}
    # Type checkers import these; the package itself does not.
    later = ("Any", "Callable", "GradNorms", "MTPLoss", "Module", "PassMetrics", "StepDecision", "Tensor", "torch")
    types |= dict.fromkeys(later, typing.Any) | {"AbstractContextManager": AbstractContextManager, "Callable": Callable}
    types |= {"Sequence": Sequence, "Verification": tuple, "torch": SimpleNamespace(nn=SimpleNamespace(Module=object))}
    assert set(typing.get_type_hints(function, localns=types)) == {*names, "return"}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_and_what_is_in_it_are_documented(cls):
    doc = vars(cls).get("__doc__")
    assert doc and not doc.startswith(f"{cls.__name__}("), "what dataclass() writes says nothing"
    fields = () if issubclass(cls, tuple) else getattr(cls, "__match_args__", ())  # of a dataclass or a record
    own = [name for name in fields if name in cls.__annotations__]
    assert list(described(cls, "Attributes")) == own
    for name, member in vars(cls).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{cls.__name__}.{name}"
