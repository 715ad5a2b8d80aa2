"""README and docs/guarantees.md are true to the letter: claims.toml has each sentence and the tests that hold it.

Tables and figures are held here. The numbers of generated blocks come from the catalog and the tables under ci/.
"""

import ast
import re

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.declarations.description import setting_texts
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatrons.known import RELEASES
from megatron_mtp_patches.megatrons.states_by_release import state_in
from megatron_mtp_patches.run_record import agreement

from scripts.common.markdown import fill
from scripts.common.toml import read_toml
from scripts.demo import plots, two_ranks
from scripts.docs import declared, defects, kept
from tests.pages import ROOT, answer, shown

pytestmark = pytest.mark.forked("torch")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/guarantees.md")}
LISTED = read_toml(ROOT / "tests/scripts/claims.toml")
SAYS = [claim["says"] for claim in LISTED["claim"]]
PATCHES = {patch.id: patch for patch in CATALOG}
MOST_WORDS = 700
NETWORK = {"aiohttp", "asyncio", "ftplib", "http", "requests", "smtplib", "socket", "ssl", "urllib", "urllib3"}
# By reading: a file that the user names (reproduce, parity), our own tables, a .pth beside Megatron's packages.
WRITERS = {
    *("cli/reproduce.py", "cli/zero_touch.py", "defects/catalog.py", "engine/new_release.py", "parity/report.py"),
    *("parity/resume.py", "parity/upgrade/trees.py"),  # in folders that they remove
}


def readme():
    return TEXTS["README.md"]


def sentences(text):
    """Each sentence outside generated blocks, tables and code, without links and bold type."""
    for noise in (r"<!-- made by .*?<!-- end -->", r"<!--.*?-->", r"^```.*?^```", r"^\|.*?$", r"!\[[^]]*\]\([^)]*\)"):
        text = re.sub(noise, "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    for paragraph in re.split(r"\n\s*\n|^\* |^\d\. ", text, flags=re.MULTILINE):
        if not paragraph.lstrip().startswith("#"):
            yield from filter(None, re.split(r"(?<=[.?:])\s+(?=[A-Z`(])", " ".join(paragraph.split())))


def rows(text, columns):
    """The cells of each row of the table with these columns."""
    header = "".join(f"| {column} " for column in columns)
    (body,) = re.findall(rf"^{re.escape(header)}\|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in body.splitlines()]


def check_sentences():
    listed = {*SAYS, *LISTED["claims_nothing"]}
    written = {sentence for text in TEXTS.values() for sentence in sentences(text)}
    assert not written - listed, "list each in claims.toml, with the tests that hold it"
    assert not listed - written, "no page says this: take it from claims.toml"


def test_each_sentence_is_held_by_tests_or_claims_nothing():
    check_sentences()
    assert len(SAYS) == len(set(SAYS))


@pytest.mark.parametrize("test", sorted({test for claim in LISTED["claim"] for test in claim["held_by"]}))
def test_the_tests_that_hold_a_claim_exist(test):
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_readme_names_the_tested_releases():
    (listed,) = re.findall(r"pinned to ([\d., ]+) or a checkout of main", readme())
    assert listed.split(", ") == list(RELEASES)


def test_the_figure_of_readme_is_of_its_flags():
    """The demo's run has them, and doctor names one defect of them."""
    assert set(two_ranks.FSDP) <= set(shown("first-command").split())
    assert "Known defects that affect these flags: 1." in answer("first-command")
    assert f"](docs/{plots.TWO_RANKS})" in readme()


def test_generated_blocks_of_readme():
    contents = declared.blocks() | defects.blocks() | kept.blocks()
    blocks = {name: contents[name] for name in ("removed-defects", "parity-score", "origins")}
    assert fill(readme(), blocks) == readme()


def test_a_feature_has_the_flag_of_a_linked_patch():
    for feature, flag in rows(readme(), ["with the patches", "flag"]):
        linked = [PATCHES[name] for name in re.findall(r"docs/\w+\.md#([\w-]+)", feature) if name in PATCHES]
        assert flag.strip("`") in {one.name.split()[0] for patch in linked for one in setting_texts(patch)}, feature


def test_what_changes_without_a_flag_is_in_the_table():
    """README has a part of the table of docs/patches.md: what trains otherwise, and what ends a run."""
    named = set()
    for change, way_out in rows(readme(), ["not a repair", "turned off by"]):
        patches = [PATCHES[name] for name in re.findall(r"docs/\w+\.md#([\w-]+)", change)]
        assert patches and all(patch.unasked for patch in patches), change
        ways = {"`MEGATRON_MTP_PATCHES=repairs`", *(f"`MEGATRON_MTP_PATCHES=-{patch.id}`" for patch in patches)}
        assert way_out in {patches[0].turned_off_by, *ways}, change
        named |= {patch.id for patch in patches}
    trains_or_ends = re.compile(r"not clipped|also train|[Vv]alidation of Megatron-LM|ends (a run|before)")
    assert named == {patch.id for patch in CATALOG if trains_or_ends.search(patch.unasked)}


def test_what_is_derived_up_to_a_release():
    """A table says "up to 0.18"."""
    (limit,) = re.findall(r"as in RL \(up to ([\d.]+)\)", readme())
    lacking = [release for release in RELEASES if state_in(PATCHES["derive-mtp-labels"], release) is State.APPLIED]
    assert lacking[-1].startswith(f"{limit}.") and lacking == list(RELEASES)[: len(lacking)]


def test_how_long_ranks_wait_for_each_other():
    (seconds,) = re.findall(r"rank 0 waits\s+(\d+)\s+seconds", TEXTS["docs/guarantees.md"])
    assert (float(seconds), 2) == (agreement.TIME_TO_READ.total_seconds(), agreement.TIMEOUTS_FOR_ANSWER)
    assert "wait twice as long" in TEXTS["docs/guarantees.md"]


def modules():
    """(the path in the package, the syntax tree) of each module that ships."""
    for folder in (ROOT / "patches/megatron_mtp_patches", ROOT / "megatron_overrides"):
        for file in sorted(folder.rglob("*.py")):
            yield file.relative_to(folder).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def test_no_module_outside_the_rehearsal_reaches_a_network():
    for path, tree in modules():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
        assert path.startswith("rehearsal/") or not NETWORK & {name.partition(".")[0] for name in names}, path


def test_which_modules_write_files():
    def writes(node):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [value.value for value in node.args[:2] if isinstance(value, ast.Constant)]
        return called in ("write_text", "write_bytes") or (called == "open" and bool({"w", "wb", "a", "ab"} & {*modes}))

    calls = ((path, node) for path, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert {path for path, node in calls if writes(node)} == WRITERS


def test_a_patch_without_a_flag_says_which_numbers_it_changes():
    assert all(patch.numerics for patch in CATALOG if not setting_texts(patch))


@pytest.mark.parametrize(
    "page, true, false, check",
    [
        ("README.md", "0.16.1, 0.17.1", "0.16.0, 0.17.1", test_readme_names_the_tested_releases),
        ("README.md", "known defects](docs", "defects](docs", test_generated_blocks_of_readme),
        ("README.md", "30 of 30 planted", "31 of 30 planted", test_generated_blocks_of_readme),
        ("README.md", "`--muon-split-glu`", "`--mtp-lr`", test_a_feature_has_the_flag_of_a_linked_patch),
        ("README.md", "in RL (up to 0.18)", "in RL (up to 0.19)", test_what_is_derived_up_to_a_release),
        (
            "README.md",
            "| [Validation runs MTP heads](docs/mtp.md#mtp-acceptance-length). | `--no-mtp-eval` |\n",
            "",
            test_what_changes_without_a_flag_is_in_the_table,
        ),
        ("README.md", "(docs/two_ranks.png)", "(docs/muon_stall.png)", test_the_figure_of_readme_is_of_its_flags),
        ("README.md", "A patch applies whole or not at all.", "A patch always applies.", check_sentences),
        ("README.md", "each raises", "the job ends", check_sentences),
        ("docs/guarantees.md", "waits 30 seconds", "waits 60 seconds", test_how_long_ranks_wait_for_each_other),
        ("docs/guarantees.md", " outside a rehearsal", "", check_sentences),
    ],
)
def test_a_claim_that_is_changed_to_be_false_is_noticed(monkeypatch, page, true, false, check):
    assert true in TEXTS[page]
    monkeypatch.setitem(TEXTS, page, TEXTS[page].replace(true, false))
    with pytest.raises(AssertionError):
        check()


def test_readme_is_short():
    """What a reader sees: without comments, addresses and the lines of tables."""
    text = re.sub(r"<!--.*?-->", "", readme(), flags=re.DOTALL)
    words = re.sub(r"\]\([^)]*\)", "]", text).split()
    assert len([word for word in words if re.search(r"\w", word)]) <= MOST_WORDS
