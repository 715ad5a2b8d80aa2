"""How often an engine reads and parses the sources of what it patches: the cost of `apply()` in every process."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from megatron_mtp_patches.engine import AddField, AddFlag, AddIfMissing, PatchError, Probe, Replace, Wrap
from megatron_mtp_patches.engine.new_release import make_known_sources, write_known_sources
from megatron_mtp_patches.engine.source_questions import Question, answer

REPLACE_F = Replace("lib:f", "overrides:f")
METHOD = Wrap("lib:C.method", "overrides:add_mark")
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")
NAMED = Wrap("lib:C.method", "overrides:add_type_name", check_source=False)
FLAG = AddFlag("lib:make_parser", flag="--x", type=int, default=1, help="")
ADD_METHOD = AddIfMissing("lib:C.new_method", "overrides:new_method")
G = Replace("lib2:g", "overrides:new_method")


class Recorder:
    """What Python says of itself: how often which source is opened, and how often its text is parsed or compiled."""

    def __init__(self) -> None:
        self.counts: Counter[str] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if self.counts is None or event not in ("open", "compile"):
            return
        file = Path(str(arguments[event == "compile"])).name
        if file in ("lib.py", "lib2.py", "fingerprints.json"):
            self.counts[f"{'read' if event == 'open' else 'parse'} {file}"] += 1


RECORDER = Recorder()  # an audit hook cannot be taken out again


@pytest.fixture
def record():
    """record(action): the counts while `action` runs; of the table, only if it is asked for."""

    def run(action, table=False):
        RECORDER.counts = counts = Counter()
        try:
            action()
        finally:
            RECORDER.counts = None
        return {what: times for what, times in counts.items() if table or "json" not in what}

    yield run
    RECORDER.counts = None


@pytest.fixture
def engine(library):
    """Three patches that share edits of every kind, in two modules that are imported, as are the overrides."""
    library.write("lib2.py", "def g():\n    return 'g'\n")
    for module in ("lib", "lib2", "overrides"):
        library.load(module)
    return library.engine(
        library.patch(REPLACE_F, METHOD, DEPTH, id="one", probe=Probe("lib:C.absent")),
        library.patch(REPLACE_F, NAMED, FLAG, id="two", probe=Probe("lib:C.method", contains="x")),
        library.patch(METHOD, ADD_METHOD, G, id="three", probe=Probe("lib2:absent")),
    )


def use(engine, choice="all"):
    """Everything that asks for a source: applied add_suffix, reported, reverted."""
    for _ in range(2):
        engine.apply(choice, "raise")
        for patch in engine.catalog:
            engine.report(patch)
        engine.record()
        engine.install_missed_modules()
    engine.revert()


def test_a_known_file_is_read_once_and_never_parsed(engine, record):
    counts = record(lambda: use(engine), table=True)
    assert counts == {"read lib.py": 1, "read lib2.py": 1, "read fingerprints.json": 2}, "one table for each apply"


def test_an_unknown_file_is_read_and_parsed_once(engine, library, record):
    """It differs in a comment from the known one, so everything applies."""
    with (library.folder / "lib.py").open("a") as file:
        file.write("# a comment\n")
    assert record(lambda: use(engine)) == {"read lib.py": 1, "parse lib.py": 1, "read lib2.py": 1}
    engine.apply("all", "raise")
    assert library.load().f(1) == "override 1"


def test_modules_that_arrive_one_by_one_are_parsed_once(library, record):
    library.write("lib2.py", "def g():\n    return 'g'\n")
    engine = library.engine(library.patch(REPLACE_F, G, id="one"), library.patch(METHOD, DEPTH, id="two"))
    for file in ("lib.py", "lib2.py"):
        with (library.folder / file).open("a") as stream:
            stream.write("# a comment\n")

    def use_it():
        engine.apply("all", "raise")
        for module in ("lib2", "lib"):
            library.load(module)
            engine.record()

    counts = record(use_it)
    for file in ("lib.py", "lib2.py"):  # the import reads and compiles it once
        assert (counts[f"read {file}"], counts[f"parse {file}"]) == (2, 2)
    assert (library.load().f(1), library.load().C().method(), library.load("lib2").g(1)) == (
        "override 1",
        "method 1!",
        "new",
    )


def test_a_file_that_has_changed_is_read_again(engine, library, record):
    use(engine)
    library.edit("lib.py", "class C:", "class C:  # static")
    assert record(lambda: use(engine)) == {"read lib.py": 1, "parse lib.py": 1}


@pytest.mark.parametrize("choice, read", [("none", set()), ("-three,-two", {"lib"}), ("three", {"lib", "lib2"})])
def test_the_source_of_a_disabled_patch_is_not_read(engine, library, record, choice, read):
    assert record(lambda: use(engine, choice)) == {f"read {module}.py": 1 for module in read}


def test_the_base_alone_needs_no_known_sources_and_reads_a_file_only_for_a_missing_name(library, record):
    for module in ("lib", "overrides"):
        library.load(module)
    base = library.patch(NAMED, Wrap("lib:absent", "overrides:add_mark", check_source=False), id="base")
    engine = library.engine(library.patch(REPLACE_F), base=(base,))
    Path(engine.table_file).unlink()
    with pytest.warns(UserWarning, match="no lib:absent, on which it relies"):
        counts = record(lambda: engine.apply("none", "raise"))
    assert library.load().C().method() == "C method 1"
    assert counts == {"read lib.py": 1, "parse lib.py": 1}
    assert record(lambda: engine.install_missed_modules()) == {}


def test_a_record_depends_on_the_sources_of_what_is_applied(engine, library):
    def sources(choice):
        engine.apply(choice, "skip")
        return engine.record().rpartition("=")[2]

    before = {choice: sources(choice) for choice in ("all", "one", "three", "none")}
    assert len(set(before.values())) == 4
    library.edit("lib2.py", "'g'", "'h'")
    assert {choice for choice, digest in before.items() if sources(choice) != digest} == {"all", "three"}


def test_no_tree_is_kept(engine, library):
    gc.collect()
    before = sum(isinstance(thing, ast.AST) for thing in gc.get_objects())
    with (library.folder / "lib.py").open("a") as file:
        file.write("# a comment\n")
    use(engine)
    gc.collect()
    assert sum(isinstance(thing, ast.AST) for thing in gc.get_objects()) <= before


def tables_with(engine, change):
    table = json.loads(Path(engine.table_file).read_text())
    for by_hash in table["files"].values():
        change(by_hash)
    Path(engine.table_file).write_text(json.dumps(table))


def test_without_known_files_a_source_is_parsed_and_patched_the_same(engine, library, record):
    with (library.folder / "lib.py").open("a") as file:
        file.write("# new\n")
    tables_with(engine, dict.clear)
    assert record(lambda: use(engine))["parse lib.py"] == 1
    engine.apply("all", "raise")
    assert (library.load().f(1), library.load().C().new_method()) == ("override 1", "new")


@pytest.mark.parametrize("missing", ["fingerprint f", "exists C", "contains C.method x", "lines f"])
def test_a_source_is_parsed_where_a_known_file_lacks_an_answer(library, record, missing):
    library.edit("lib.py", "class C:", f"class C:  # known without {missing}")  # other bytes in each case
    for module in ("lib", "overrides"):
        library.load(module)
    patch = library.patch(REPLACE_F, ADD_METHOD, probe=Probe("lib:C.method", contains="x"))
    engine = library.engine(patch)

    def drop(by_hash):
        for answers in by_hash.values():
            del answers[missing]

    tables_with(engine, drop)
    assert record(lambda: use(engine))["parse lib.py"] == 1
    engine.apply("all", "raise")
    assert library.load().f(1) == "override 1"


def test_one_changed_byte_makes_a_file_unknown(engine, library, record):
    """The same length, and a change that counts."""
    library.edit("lib.py", "original", "Original")
    with pytest.raises(PatchError, match="lib:f is not the source of any release"):
        engine.apply("all", "raise")


def test_a_question_that_only_another_engine_asks_is_answered_from_the_source(library, record):
    library.edit("lib.py", "class C:", "class C:  # known to the first engine")
    for module in ("lib", "overrides"):
        library.load(module)
    first = library.engine(library.patch(REPLACE_F))
    use(first)
    other = library.patch(Replace("lib:C.static", "overrides:new_method"))
    second = type(first)(first.project, (other,), first.table_file)
    assert record(lambda: second.apply("all", "skip")) == {"read lib.py": 1, "parse lib.py": 1}
    assert "has no known source in any release" in second.report(other).reason


def test_a_lambda_may_be_replaced(library):
    """A lambda has no `def` with which its line could be compared."""
    library.write("lambdas.py", 'h = lambda x: f"h {x}"\n')
    lambdas = library.load("lambdas")
    library.applied(Replace("lambdas:h", "overrides:f"))
    assert lambdas.h(1) == "override 1"


def test_functions_are_found_wherever_statements_are():
    source = """
        def f(): pass
        class C:
            @property
            @staticmethod
            def f(): pass
        try:
            def f(): pass
        except Exception:
            async def f(): pass
        """
    source = textwrap.dedent(source) + (
        "else:\n def f(): pass\nfinally:\n def f(): pass\nwhile x:\n def f(): pass\nwith x:\n def f(): pass\n"
        "for x in y:\n def f():\n  def f(): pass\nmatch x:\n case 1:\n  if y:\n   def f(): pass\n"
    )
    tree = ast.parse(source)
    answered = answer(tree, [Question("lines", "f"), Question("lines", "g")])
    firsts = [
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert len(firsts) == 11
    assert (sorted(answered["lines f"]), answered["lines g"]) == (sorted(firsts), [])


def test_a_file_of_each_folder_is_known(library, record, tmp_path):
    engine = library.engine(library.patch(REPLACE_F))
    other = tmp_path / "other"
    other.mkdir()
    changed = (library.folder / "lib.py").read_text() + "# packaged otherwise\n"
    (other / "lib.py").write_text(changed)
    known = make_known_sources(engine.catalog, {"1.0": [str(library.folder), str(other)]})
    write_known_sources(known, Path(engine.table_file))
    library.write("lib.py", changed)
    importlib.invalidate_caches()
    for module in ("lib", "overrides"):
        library.load(module)
    assert record(lambda: use(engine)) == {"read lib.py": 1}
