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
from megatron_mtp_patches.engine import AddField, AddFlag, Export, PatchError, Probe, Replace, Wrap
from megatron_mtp_patches.engine.fingerprints import make_table
from megatron_mtp_patches.engine.questions import Question, answer

WATER = Replace("garden:water", "ours:water")
GROW = Wrap("garden:Tree.grow", "ours:loudly")
DEPTH = AddField("garden:Bed", field="depth", type=int, default=7, doc="")
NAMED = Wrap("garden:Tree.grow", "ours:named", any_source=True)
FLAG = AddFlag("garden:make_parser", flag="--x", type=int, default=1, help="")
BLOOM = Export("garden:Tree.bloom", "ours:bloom")
TOOL = Replace("shed:tool", "ours:bloom")


class Recorder:
    """What Python says of itself: how often which source is opened, and how often its text is parsed or compiled."""

    def __init__(self) -> None:
        self.counts: Counter[str] | None = None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if self.counts is None or event not in ("open", "compile"):
            return
        file = Path(str(arguments[event == "compile"])).name
        if file in ("garden.py", "shed.py", "fingerprints.json"):
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
def engine(garden):
    """Three patches that share edits of every kind, in two modules that are imported, as are the overrides."""
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    for module in ("garden", "shed", "ours"):
        garden.load(module)
    return garden.engine(
        garden.patch(WATER, GROW, DEPTH, id="one", probe=Probe("garden:Tree.shrink")),
        garden.patch(WATER, NAMED, FLAG, id="two", probe=Probe("garden:Tree.grow", contains="litres")),
        garden.patch(GROW, BLOOM, TOOL, id="three", probe=Probe("shed:broom")),
    )


def use(engine, choice="all"):
    """Everything that asks for a source: applied twice, reported, reverted."""
    for _ in range(2):
        engine.apply(choice, "raise")
        for patch in engine.catalog:
            engine.installer.report(patch)
        engine.installer.record()
        engine.catch_up()
    engine.revert()


def test_a_known_file_is_read_once_and_never_parsed(engine, record):
    counts = record(lambda: use(engine), table=True)
    assert counts == {"read garden.py": 1, "read shed.py": 1, "read fingerprints.json": 2}, "one table for each apply"


def test_an_unknown_file_is_read_and_parsed_once(engine, garden, record):
    """It differs in a comment from the known one, so everything applies."""
    with (garden.folder / "garden.py").open("a") as file:
        file.write("# a comment\n")
    assert record(lambda: use(engine)) == {"read garden.py": 1, "parse garden.py": 1, "read shed.py": 1}
    engine.apply("all", "raise")
    assert garden.load().water(1) == "our 1"


def test_modules_that_arrive_one_by_one_are_parsed_once(garden, record):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    engine = garden.engine(garden.patch(WATER, TOOL, id="one"), garden.patch(GROW, DEPTH, id="two"))
    for file in ("garden.py", "shed.py"):
        with (garden.folder / file).open("a") as stream:
            stream.write("# a comment\n")

    def use_it():
        engine.apply("all", "raise")
        for module in ("shed", "garden"):
            garden.load(module)
            engine.installer.record()

    counts = record(use_it)
    for file in ("garden.py", "shed.py"):  # the import reads and compiles it once
        assert (counts[f"read {file}"], counts[f"parse {file}"]) == (2, 2)
    assert (garden.load().water(1), garden.load().Tree().grow(), garden.load("shed").tool(1)) == (
        "our 1",
        "grew 1!",
        "bloomed",
    )


def test_a_file_that_has_changed_is_read_again(engine, garden, record):
    use(engine)
    garden.edit("garden.py", "class Tree:", "class Tree:  # oak")
    assert record(lambda: use(engine)) == {"read garden.py": 1, "parse garden.py": 1}


@pytest.mark.parametrize("choice, read", [("none", set()), ("-three,-two", {"garden"}), ("three", {"garden", "shed"})])
def test_what_is_left_out_is_not_read(engine, garden, record, choice, read):
    assert record(lambda: use(engine, choice)) == {f"read {module}.py": 1 for module in read}


def test_the_base_alone_needs_no_table_and_reads_only_to_miss_a_name(garden, record):
    for module in ("garden", "ours"):
        garden.load(module)
    base = garden.patch(NAMED, Wrap("garden:absent", "ours:loudly", any_source=True), id="base")
    engine = garden.engine(garden.patch(WATER), base=(base,))
    Path(engine.table_file).unlink()
    with pytest.warns(UserWarning, match="no garden:absent, on which it relies"):
        counts = record(lambda: engine.apply("none", "raise"))
    assert garden.load().Tree().grow() == "Tree grew 1"
    assert counts == {"read garden.py": 1, "parse garden.py": 1}
    assert record(lambda: engine.catch_up()) == {}


def test_a_record_depends_on_the_sources_of_what_is_applied(engine, garden):
    def sources(choice):
        engine.apply(choice, "skip")
        return engine.installer.record().rpartition("=")[2]

    before = {choice: sources(choice) for choice in ("all", "one", "three", "none")}
    assert len(set(before.values())) == 4
    garden.edit("shed.py", "spade", "rake")
    assert {choice for choice, digest in before.items() if sources(choice) != digest} == {"all", "three"}


def test_no_tree_is_kept(engine, garden):
    gc.collect()
    before = sum(isinstance(thing, ast.AST) for thing in gc.get_objects())
    with (garden.folder / "garden.py").open("a") as file:
        file.write("# a comment\n")
    use(engine)
    gc.collect()
    assert sum(isinstance(thing, ast.AST) for thing in gc.get_objects()) <= before


def tables_with(engine, change):
    table = json.loads(Path(engine.table_file).read_text())
    for by_hash in table["files"].values():
        change(by_hash)
    Path(engine.table_file).write_text(json.dumps(table))


def test_a_table_without_files_makes_a_parse_and_the_same_patches(engine, garden, record):
    with (garden.folder / "garden.py").open("a") as file:
        file.write("# new\n")
    tables_with(engine, dict.clear)
    assert record(lambda: use(engine))["parse garden.py"] == 1
    engine.apply("all", "raise")
    assert (garden.load().water(1), garden.load().Tree().bloom()) == ("our 1", "bloomed")


@pytest.mark.parametrize("missing", ["fingerprint water", "exists Tree", "contains Tree.grow litres", "lines water"])
def test_a_table_that_lacks_an_answer_is_no_answer(garden, record, missing):
    garden.edit("garden.py", "class Tree:", f"class Tree:  # known without {missing}")  # other bytes in each case
    for module in ("garden", "ours"):
        garden.load(module)
    patch = garden.patch(WATER, BLOOM, probe=Probe("garden:Tree.grow", contains="litres"))
    engine = garden.engine(patch)

    def drop(by_hash):
        for answers in by_hash.values():
            del answers[missing]

    tables_with(engine, drop)
    assert record(lambda: use(engine))["parse garden.py"] == 1
    engine.apply("all", "raise")
    assert garden.load().water(1) == "our 1"


def test_one_byte_makes_a_file_unknown(engine, garden, record):
    """The same length, and a change that counts."""
    garden.edit("garden.py", "poured", "Poured")
    with pytest.raises(PatchError, match="garden:water is not the source of any release"):
        engine.apply("all", "raise")


def test_what_another_engine_asks_of_a_known_file_is_asked_of_its_source(garden, record):
    garden.edit("garden.py", "class Tree:", "class Tree:  # known to the first engine")
    for module in ("garden", "ours"):
        garden.load(module)
    first = garden.engine(garden.patch(WATER))
    use(first)
    other = garden.patch(Replace("garden:Tree.species", "ours:bloom"))
    second = type(first)((other,), first.table_file)
    assert record(lambda: second.apply("all", "skip")) == {"read garden.py": 1, "parse garden.py": 1}
    assert "not the source of any release" in second.installer.report(other).reason


def test_a_function_that_the_source_does_not_name_may_run(garden):
    """A lambda has no `def` with which its line could be compared."""
    garden.write("hose.py", 'spray = lambda litres: f"sprayed {litres}"\n')
    hose = garden.load("hose")
    garden.applied(Replace("hose:spray", "ours:water"))
    assert hose.spray(1) == "our 1"


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
    found = answer(tree, [Question("lines", "f"), Question("lines", "g")])
    firsts = [
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert len(firsts) == 11
    assert (sorted(found["lines f"]), found["lines g"]) == (sorted(firsts), [])


# -- the table ---------------------------------------------------------------------------------------------------


def test_a_release_may_be_in_several_folders(garden, tmp_path):
    """The first says what the release has; another may lack modules, and may differ."""
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    source = (garden.folder / "garden.py").read_text()
    (wheel / "garden.py").write_text(source.replace("poured", "dripped"))
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    folders = [str(garden.folder), str(wheel)]
    table = make_table(
        [garden.patch(WATER, GROW, TOOL, Replace("attic:box", "ours:bloom"))], {"1.0": folders, "2.0": folders[:1]}
    )
    assert list(table["targets"]["garden:water"].values()) == [["1.0", "2.0"], ["1.0"]]
    assert list(table["targets"]["garden:Tree.grow"].values()) == [["1.0", "2.0"]]
    assert list(table["targets"]["shed:tool"].values()) == [["1.0", "2.0"]]
    assert table["targets"]["attic:box"] == {"absent": ["1.0", "2.0"]}
    assert {module: len(by_hash) for module, by_hash in table["files"].items()} == {"garden": 2, "shed": 1}


def test_a_file_of_each_folder_is_known(garden, record, tmp_path):
    engine = garden.engine(garden.patch(WATER))
    other = tmp_path / "other"
    other.mkdir()
    changed = (garden.folder / "garden.py").read_text() + "# packaged otherwise\n"
    (other / "garden.py").write_text(changed)
    table = make_table(engine.catalog, {"1.0": [str(garden.folder), str(other)]})
    Path(engine.table_file).write_text(json.dumps(table))
    garden.write("garden.py", changed)
    importlib.invalidate_caches()
    for module in ("garden", "ours"):
        garden.load(module)
    assert record(lambda: use(engine)) == {"read garden.py": 1}
