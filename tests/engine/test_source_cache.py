"""How often an engine reads the sources of what it patches: the cost of `apply()` in every process."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from megatron_mtp_patches.engine import AddField, AddFlag, Override, Probe, Wrap

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Wrap("lib:C.method", "overrides:add_mark")
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")
NAMED = Wrap("lib:C.method", "overrides:add_type_name", check_source=False)
FLAG = AddFlag("lib:make_parser", flag="--x", type=int, default=1, help="")
ADD_METHOD = Override("lib:C.new_method", "overrides:new_method", where="missing")
G = Override("lib2:g", "overrides:new_method")


@pytest.fixture
def record():
    """record(action): how often Python opens each source while `action` runs."""

    def run(action):
        opened, is_over = Counter(), threading.Event()

        def hear(event, arguments):
            file = Path(str(arguments[0])).name if event == "open" else ""
            if file in ("lib.py", "lib2.py", "fingerprints.json") and not is_over.is_set():
                opened[file] += 1

        sys.addaudithook(hear)  # which cannot be taken out again
        action()
        is_over.set()
        return opened

    return run


@pytest.fixture
def engine(library):
    """Three patches that share edits of every kind, in two modules that are imported, as are the overrides."""
    for module in ("lib", "lib2", "overrides"):
        library.load(module)
    engine = library.engine(
        library.patch(REPLACE_F, METHOD, DEPTH, id="one", probe=Probe("lib:C.absent")),
        library.patch(REPLACE_F, NAMED, FLAG, id="two", probe=Probe("lib:C.method", contains="x")),
        library.patch(METHOD, ADD_METHOD, G, id="three", probe=Probe("lib2:absent")),
    )
    for file in ("lib.py", "lib2.py"):
        with (library.folder / file).open("a") as stream:
            stream.write("# not yet read\n")
    return engine


def use(engine, choice="all"):
    """Everything that asks for a source."""
    for _ in range(2):
        engine.apply(choice, "raise")
        for patch in engine.catalog:
            engine.report(patch)
        engine.record()
        engine.install_missed_modules()
    engine.revert()


def test_a_source_is_read_again_only_where_it_has_changed(engine, library, record):
    assert record(lambda: use(engine)) == {"lib.py": 1, "lib2.py": 1, "fingerprints.json": 2}, "a table for each apply"
    library.edit("lib.py", "class C:", "class C:  # static")
    assert record(lambda: use(engine)) == {"lib.py": 1, "fingerprints.json": 2}
    engine.apply("all", "raise")
    assert library.load().f(1) == "override 1"


@pytest.mark.parametrize("choice, read", [("none", set()), ("-three,-two", {"lib"}), ("three", {"lib", "lib2"})])
def test_the_source_of_a_disabled_patch_is_not_read(engine, library, record, choice, read):
    assert record(lambda: use(engine, choice)).keys() - {"fingerprints.json"} == {f"{module}.py" for module in read}


def test_the_base_alone_needs_no_known_sources_and_reads_a_file_only_for_a_missing_name(library, record):
    for module in ("lib", "overrides"):
        library.load(module)
    base = library.patch(NAMED, Wrap("lib:absent", "overrides:add_mark", check_source=False), id="base")
    engine = library.engine(library.patch(REPLACE_F), base=(base,))
    Path(engine.table_file).unlink()
    library.edit("lib.py", "class C:", "class C:  # read by nobody")
    with pytest.warns(UserWarning, match="no lib:absent, on which it relies"):
        counts = record(lambda: engine.apply("none", "raise"))
    assert library.load().C().method() == "C method 1"
    assert counts == {"lib.py": 1}
    assert record(engine.install_missed_modules) == {}


def test_a_record_depends_on_the_sources_of_what_is_applied(engine, library):
    def sources(choice):
        engine.apply(choice, "skip")
        return engine.record().rpartition("=")[2]

    before = {choice: sources(choice) for choice in ("all", "one", "three", "none")}
    assert len(set(before.values())) == 4
    library.edit("lib2.py", '"g"', '"other"')
    assert {choice for choice, digest in before.items() if sources(choice) != digest} == {"all", "three"}


def test_a_lambda_may_be_replaced(library):
    """A lambda has no `def` with which its line could be compared."""
    library.write("lambdas.py", 'h = lambda x: f"h {x}"\n')
    lambdas = library.load("lambdas")
    library.applied(Override("lambdas:h", "overrides:f"))
    assert lambdas.h(1) == "override 1"
