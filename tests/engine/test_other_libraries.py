"""Other libraries that patch the same targets, before these patches or after them."""

from __future__ import annotations

import pytest
from megatron_mtp_patches.engine import AddField, Override, PatchError, Wrap

METHOD = Override("lib:C.method", "overrides:method")
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")

OTHER_LIBRARY = """
import functools
import lib
import wrapt

def _grow(self, by=1):
    return "other_library"

@functools.wraps(lib.C.method)
def _around(self, by=1):
    return "other_library around " + _around.__wrapped__(self, by)

bare = _grow
wrapped = _around
partial = functools.partial(_grow, None)

@wrapt.decorator
def _decorate(wrapped, instance, args, kwargs):
    return "other_library around " + wrapped(*args, **kwargs)

class Callable:
    def __init__(self, function):
        functools.update_wrapper(self, function)

wrapt_decorated = _decorate(lib.C.method)
instance = Callable(lib.C.method)
"""


@pytest.mark.parametrize("kind", ["bare", "wrapped", "partial", "wrapt_decorated", "instance"])
def test_a_method_patched_by_another_library_is_not_replaced(library, kind):
    library.write("other_library.py", OTHER_LIBRARY)
    cls = library.load().C
    cls.method = theirs = getattr(library.load("other_library"), kind)
    with pytest.raises(PatchError, match=r"lib:C.method was already changed by (other_library|functools\.partial)"):
        library.applied(METHOD)
    assert vars(cls)["method"] is theirs


def test_a_wrap_goes_around_another_library_s_wrapper_but_not_around_its_replacement(library):
    library.write("other_library.py", OTHER_LIBRARY)
    cls, other_library = library.load().C, library.load("other_library")
    wrap = Wrap("lib:C.method", "overrides:add_mark")
    cls.method = other_library.wrapped
    library.applied(wrap).revert()
    assert cls().method() == "other_library around method 1"
    cls.method = other_library.bare
    with pytest.raises(PatchError, match=r"already changed by other_library .*Import lib_patches before it"):
        library.applied(wrap)
    library.applied(Wrap("lib:C.method", "overrides:add_mark", check_source=False))
    assert cls().method() == "other_library!"
