"""Modules and overrides that several threads import at once."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest
from megatron_mtp_patches.engine import Override, PatchError, Wrap

PATIENCE = 20


@pytest.fixture
def meeting(library, monkeypatch):
    """Events by which modules that are being imported wait for each other: lib_b waits for the overrides of lib_a."""
    module = types.ModuleType("meeting")
    module.b_begun, module.overrides_begun = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "meeting", module)
    library.write("lib_a.py", "def a():\n    return 'a'\n")
    library.write(
        "lib_b.py",
        f"""
        import time, meeting
        meeting.b_begun.set()
        meeting.overrides_begun.wait({PATIENCE})
        time.sleep(0.5)  # until the other thread waits for this module

        def b():
            return "b"
        """,
    )
    return module


@pytest.fixture
def import_in_threads():
    """import_in_threads(name, ...): what each import raised, or 'hangs'."""

    def run(*names):
        errors = dict.fromkeys(names, "hangs")

        def load(name):
            try:
                importlib.import_module(name)
                errors[name] = None
            except BaseException as error:
                errors[name] = error

        threads = [threading.Thread(target=load, args=[name], daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return errors

    return run


def test_an_override_that_imports_what_another_thread_is_importing(library, meeting, import_in_threads):
    """lib_a's override imports lib_b, which waits in the other thread to be patched."""
    library.write(
        "overrides_a.py",
        f"""
        import meeting
        meeting.b_begun.wait({PATIENCE})
        meeting.overrides_begun.set()
        import lib_b

        def a():
            return "override a"
        """,
    )
    engine = library.applied(Override("lib_a:a", "overrides_a:a"), Wrap("lib_b:b", "overrides:add_mark"))
    assert import_in_threads("lib_b", "lib_a") == {"lib_b": None, "lib_a": None}
    assert (library.load("lib_a").a(), library.load("lib_b").b()) == ("override a", "b!")
    engine.revert()
    assert (library.load("lib_a").a(), library.load("lib_b").b()) == ("a", "b")


def test_a_module_whose_override_another_thread_is_importing_is_patched_after_it(library, meeting, import_in_threads):
    """Each thread waits for the other's module, so Python lets one go on with an override that is half imported."""
    library.write(
        "overrides_ab.py",
        f"""
        import meeting
        meeting.b_begun.wait({PATIENCE})
        meeting.overrides_begun.set()
        import lib_b

        def a():
            return "override a"

        def b():
            return "override b"
        """,
    )
    library.applied(Override("lib_a:a", "overrides_ab:a"), Override("lib_b:b", "overrides_ab:b"))
    assert import_in_threads("lib_b", "lib_a") == {"lib_b": None, "lib_a": None}
    assert (library.load("lib_a").a(), library.load("lib_b").b()) == ("override a", "override b")


def test_an_override_that_fails_while_another_thread_imports_is_imported_when_that_thread_is_done(
    library, meeting, import_in_threads
):
    """Where it was imported once more at once, both threads stood still: one held the lock that the other needed."""
    meeting.attempts = []
    library.edit("lib_b.py", f"wait({PATIENCE})", "wait(1)")
    library.write(
        "overrides_a.py",
        f"""
        import meeting
        meeting.attempts.append(meeting.b_begun.wait({PATIENCE}))
        if len(meeting.attempts) == 1:
            raise ImportError("as from a module that the other thread has half imported")
        meeting.overrides_begun.set()
        import lib_b

        def a():
            return "override a"
        """,
    )
    library.applied(Override("lib_a:a", "overrides_a:a"), Wrap("lib_b:b", "overrides:add_mark"))
    assert import_in_threads("lib_b", "lib_a") == {"lib_b": None, "lib_a": None}
    assert (library.load("lib_a").a(), library.load("lib_b").b()) == ("override a", "b!")


def test_an_override_that_fails_while_an_outer_module_is_imported_is_refused_with_the_outer_one(library):
    library.write("lib_outer.py", "import lib\nseen = lib.f(1)\n\ndef f(x):\n    return 'outer'\n")
    library.write("broken_overrides.py", "raise ImportError('it lacks a package')\n")
    library.applied(Override("lib:f", "broken_overrides:f"), Wrap("lib_outer:f", "overrides:add_mark"))
    with pytest.raises(PatchError, match="lib: ImportError.*it lacks a package"):
        library.load("lib_outer")
    assert library.load("lib").f(1) == "original 1"


def test_a_module_that_several_threads_find_unpatched_is_patched_once(library):
    library.write("slow_overrides.py", "import time\ntime.sleep(0.5)\nfrom overrides import add_mark\n")
    engine = library.engine(library.patch(Wrap("lib:f", "slow_overrides:add_mark")))
    engine.apply("all", "raise")
    ours = next(finder for finder in sys.meta_path if type(finder).__module__.endswith("engine.import_hook"))
    sys.meta_path.remove(ours)  # what a finder that comes before ours, and finds the module, amounts to
    module = library.load()
    threads = [threading.Thread(target=engine.install_missed_modules, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert module.f(1) == "original 1!"
    engine.revert()
    assert module.f(1) == "original 1"
