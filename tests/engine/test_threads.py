"""Modules and overrides that several threads import at once."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest
from megatron_mtp_patches.engine import Replace, Wrap

PATIENCE = 20


@pytest.fixture
def meeting(garden):
    """Events by which modules that are being imported wait for each other."""
    module = types.ModuleType("meeting")
    for name in ("soil_begun", "ours_begun"):
        setattr(module, name, threading.Event())
    sys.modules["meeting"] = module
    garden.write("rain.py", "def fall():\n    return 'drops'\n")
    yield module
    del sys.modules["meeting"]


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


def test_an_override_that_imports_what_another_thread_is_importing(garden, meeting, import_in_threads):
    """rain's override imports soil, which waits in the other thread to be patched."""
    garden.write(
        "soil.py",
        f"""
        import meeting
        meeting.soil_begun.set()
        meeting.ours_begun.wait({PATIENCE})

        def dig():
            return "hole"
        """,
    )
    garden.write(
        "ours_rain.py",
        f"""
        import meeting
        meeting.soil_begun.wait({PATIENCE})
        meeting.ours_begun.set()
        import soil

        def fall():
            return "our drops"
        """,
    )
    engine = garden.applied(Replace("rain:fall", "ours_rain:fall"), Wrap("soil:dig", "ours:loudly"))
    assert import_in_threads("soil", "rain") == {"soil": None, "rain": None}
    assert (garden.load("rain").fall(), garden.load("soil").dig()) == ("our drops", "hole!")
    engine.revert()
    assert (garden.load("rain").fall(), garden.load("soil").dig()) == ("drops", "hole")


def test_a_module_whose_override_another_thread_is_importing_is_patched_after_it(garden, meeting, import_in_threads):
    """Each thread waits for the other's module, so Python lets one go on with an override that is half imported."""
    garden.write(
        "soil.py",
        f"""
        import time, meeting
        meeting.soil_begun.set()
        meeting.ours_begun.wait({PATIENCE})
        time.sleep(0.5)  # until the other thread waits for this module

        def dig():
            return "hole"
        """,
    )
    garden.write(
        "ours_both.py",
        f"""
        import meeting
        meeting.soil_begun.wait({PATIENCE})
        meeting.ours_begun.set()
        import soil

        def fall():
            return "our drops"

        def dig():
            return "our hole"
        """,
    )
    garden.applied(Replace("rain:fall", "ours_both:fall"), Replace("soil:dig", "ours_both:dig"))
    assert import_in_threads("soil", "rain") == {"soil": None, "rain": None}
    assert (garden.load("rain").fall(), garden.load("soil").dig()) == ("our drops", "our hole")


def test_an_override_that_is_imported_before_its_target(garden):
    garden.write("ours_first.py", "import garden\n\ndef water(litres):\n    return 'our first'\n")
    engine = garden.applied(Replace("garden:water", "ours_first:water"))
    garden.load("ours_first")
    assert garden.load().water(1) == "our first"
    engine.revert()
    assert garden.load().water(1) == "poured 1"


def test_many_threads_that_import_and_ask_at_once_patch_once(garden, import_in_threads):
    names = [f"row{number}" for number in range(12)]
    for name in names:
        garden.write(f"{name}.py", "import time\ntime.sleep(0.01)\ndef hoe(litres):\n    return 'hoed'\n")
    engine = garden.engine(garden.patch(*(Wrap(f"{name}:hoe", "ours:loudly") for name in names)))
    engine.apply("all", "raise")
    asking = [threading.Thread(target=engine.catch_up, daemon=True) for _ in range(8)]
    for thread in asking:
        thread.start()
    assert set(import_in_threads(*names).values()) == {None}
    for thread in asking:
        thread.join(PATIENCE)
    assert [garden.load(name).hoe(1) for name in names] == ["hoed!"] * len(names)


def test_a_module_that_two_threads_find_unpatched_is_patched_once(garden):
    garden.write("ours_slow.py", "import time\ntime.sleep(0.5)\nfrom ours import loudly\n")
    engine = garden.engine(garden.patch(Wrap("garden:water", "ours_slow:loudly")))
    engine.apply("all", "raise")
    ours = next(finder for finder in sys.meta_path if type(finder).__module__.endswith("engine.watch"))
    sys.meta_path.remove(ours)  # what a finder that comes before ours, and finds the module, amounts to
    module = garden.load()
    threads = [threading.Thread(target=engine.catch_up, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert module.water(1) == "poured 1!"
    engine.revert()
    assert module.water(1) == "poured 1"
