"""Write the files of a new patch, or of a new known defect. What a person has to say is marked with FILL IN or fill_in.

    nox -s new -- patch ID TOPIC [MODULE]   declaration, override, test, section of a page, lines of catalog, CHANGELOG
    nox -s new -- defect ID TOPIC [MODULE]  the Defect and its program

TOPIC is a folder of patches/megatron_mtp_patches. MODULE is that of megatron_overrides/TOPIC to which the override is
added, as `sinks` or `heads.stage_weights`; without one it gets a module that is named as the patch. Of a defect it is
the module that declares it, as `gradient_sum_defects`; without one, `defects`.
`pytest tests/conformance/test_catalog.py` lists what is marked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.common.arguments import make_parser
from scripts.common.process import ROOT

MARK = "FILL IN"
ID = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)+")

DECLARATION = '''\
"""Declares {id}."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="{id}",
    summary="{MARK} what it does, in a line without a full stop",
    problem="{MARK} what goes wrong without it.",
    adds=("{MARK} what a user, or other code, can see of it.",),
    undetected="{MARK} why no setting tells of it; leave this out where a defect names the patch.",
    numerics="{MARK} which numbers change, and when.",
    is_repair=True,  # {MARK}: leave this out where a setting asks for the patch
    edits=(
        Wrap(
            "{MARK}: package.module:Class.function",
            "megatron_overrides.{topic}.{module}:fill_in",
        ),
    ),
)
'''
OVERRIDE = '''\
"""{MARK}: the subject of this module."""

from typing import Any

from megatron_overrides.call import Call
'''
FUNCTION = '''

def fill_in(call: Call) -> Any:
    """Wraps {MARK}: does what?"""
    return call.proceed()
'''
TESTS = '''\
"""{MARK}: what holds with the patch, in a sentence."""

import pytest

pytestmark = pytest.mark.forked("patched")
'''
TEST = """

@pytest.mark.guards("{id}")
def test_fill_in():
    pytest.fail("{MARK}: what is seen to be wrong without the patch")
"""
SECTION = """
## {id}

<!-- made by python -m scripts.docs: {id} -->
<!-- end -->
"""
DEFECT = """\
    Defect(
        id="{id}",
        effect="{MARK} what it does to the numbers, or to the run",
        severity=3,
        signs=Sign("{MARK}: package.module:Class.function", has="the wrong code", lacks="the right code"),
        affects=lambda run: False,  # {MARK}: the runs that meet it
        when="{MARK} flags, as a user writes them",
        only_if="{MARK} what flags cannot tell; leave this out where they tell all",
        instead="{MARK} what to do without a patch; leave this out where nothing helps",
        state="{state}",
        evidence="reproduced",
        patch="",  # {MARK}: the id of the patch that removes it, or leave this out
    ),
"""
DEFECTS = '''\
"""{MARK}: the topic."""

from __future__ import annotations

from ..defects.declare import Defect, Sign

DEFECTS = (
)
'''
PROGRAM = '''\
"""{MARK}: what it runs, and what it measures."""


def reproduce():
    right, seen = 1.0, 0.0  # {MARK}: what is right, and what this Megatron gives
    return right, seen
'''


def words_of(identifier: str, topic: str, module: str) -> dict[str, str]:
    """Return what the texts above are filled with."""
    name, number = identifier.lower().replace("-", "_"), re.fullmatch(r"ML-(\d+)[a-z]?", identifier)
    state = "open" if number else "unreported"
    return {"id": identifier, "topic": topic, "module": module, "name": name, "state": state, "MARK": MARK}


def write_patch(words: dict[str, str], root: Path) -> dict[str, str]:
    """Return {file: its text} of a new patch."""
    topic, name = words["topic"], words["name"]
    words = {**words, "module": words["module"] or name}
    catalog, page = "patches/megatron_mtp_patches/catalog.py", f"docs/{topic}.md"
    before = read(root / page) or f"# {topic.capitalize()}\n"
    folders, _, subject = f"{topic}.{words['module']}".replace(".", "/").rpartition("/")
    override, test = (
        f"megatron_overrides/{folders}/{subject}.py",
        f"tests/megatron_overrides/{folders}/test_{subject}.py",
    )
    functions, tests = read(root / override) or OVERRIDE.format_map(words), read(root / test) or TESTS.format_map(words)
    line = f"* `{words['id']}`: {MARK} what no longer goes wrong, in which releases.\n"
    return {
        f"patches/megatron_mtp_patches/{topic}/{name}.py": DECLARATION.format_map(words),
        override: functions + FUNCTION.format_map(words),
        test: tests + TEST.format_map(words),
        page: before + SECTION.format_map(words),
        catalog: insert(root / catalog, f'    "{topic}.{name}",\n', rf'^    "{topic}\.\w+",.*\n', -1),
        "CHANGELOG.md": insert(root / "CHANGELOG.md", line, r"^## .*\n\n", 0),
    }


def write_defect(words: dict[str, str], root: Path) -> dict[str, str]:
    """Return {file: its text} of a new defect."""
    folder = f"patches/megatron_mtp_patches/{words['topic']}"
    file = f"{folder}/{words['module'] or 'defects'}.py"
    text = read(root / file) or DEFECTS.format_map(words)
    declared, end, after = text.rpartition("\n)\n")
    return {
        file: f"{declared}\n{DEFECT.format_map(words)}{end[1:]}{after}",
        f"{folder}/programs/__init__.py": "",
        f"{folder}/programs/{words['name']}.py": PROGRAM.format_map(words),
    }


def read(file: Path) -> str:
    """Return the text of a file; '' where there is none."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def insert(file: Path, line: str, pattern: str, which: int) -> str:
    """Return the text of a file with a line more, below the one of the places that the pattern finds."""
    text = file.read_text(encoding="utf-8")
    place = list(re.finditer(pattern, text, re.MULTILINE))[which].end()
    return text[:place] + line + text[place:]


def known_ids(root: Path) -> set[str]:
    """Return the ids of all patches and defects, and what files of programs are called."""
    package = root / "patches" / "megatron_mtp_patches"
    texts = [file.read_text(encoding="utf-8") for file in package.glob("*/*.py")]
    return {name.lower() for text in texts for name in re.findall(r'^ +id="([^"]+)",$', text, re.MULTILINE)}


def main(root: Path = ROOT) -> int:
    parser = make_parser("scripts.new", __doc__)
    kinds: dict[str, Callable[[dict[str, str], Path], dict[str, str]]] = {"patch": write_patch, "defect": write_defect}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("id", metavar="ID")
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("module", metavar="MODULE", nargs="?", default="")
    options = parser.parse_args()
    catalog = (root / "patches/megatron_mtp_patches/catalog.py").read_text(encoding="utf-8")
    topics = sorted(set(re.findall(r'^    "(\w+)\.\w+",', catalog, re.MULTILINE)))
    if not ID.fullmatch(options.id) or (options.kind == "patch" and not options.id.islower()):
        parser.error(f"{options.id!r} is no id: write words with dashes between them, as count-loss-tokens-over-cp")
    if options.id.lower() in known_ids(root):
        parser.error(f"{options.id} exists: megatron-mtp-patches explain {options.id}")
    if options.topic not in topics:
        parser.error(f"there is no topic {options.topic!r}; there are {', '.join(topics)}")
    if options.kind == "defect" and not (options.module or "defects").endswith("defects"):
        parser.error(f"{options.module!r} declares no defects: its name ends with `defects`, as gradient_sum_defects")
    for name, text in kinds[options.kind](words_of(options.id, options.topic, options.module), root).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
