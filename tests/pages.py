"""The commands that README and docs/ show, and how bash reads them.

Above each block of bash stands `<!-- run by a test: NAME -->` or `<!-- not run by a test: REASON -->`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<marker>[^\n]*) -->\n)?^```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# Stands for each program: writes its words, and the chosen patches, instead of doing anything.
PROGRAM = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["SHOWN"], "a") as file:
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    print(json.dumps([words, os.environ.get("MEGATRON_MTP_PATCHES", "all")]), file=file)
"""


class Block(NamedTuple):
    """A block of bash.

    Attributes:
        page: its file.
        marker: the comment in the line above; '' without one.
        text: the lines of the block.
    """

    page: Path
    marker: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(page, match["marker"] or "", match["text"])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def shown(name: str) -> str:
    """The text of the block `name`; where several pages show it, they show the same."""
    (text,) = {block.text for block in blocks() if block.marker == f"run by a test: {name}"}
    return text


def answer(name: str) -> str:
    """The text below `<!-- answer of NAME -->` on a page, as one line."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    (text,) = re.findall(f"^<!-- answer of {name} -->\n```text\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


def read_by_bash(text: str, folder: Path) -> list[list[str]]:
    """The words of each command of `text`, the name of the program first; none of the programs runs."""
    return [words for words, _ in read_with_patches(text, folder)]


def read_with_patches(text: str, folder: Path) -> list[tuple[list[str], str]]:
    """The same, each with the value of MEGATRON_MTP_PATCHES."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("megatron-mtp-patches", "python", "torchrun"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    written = folder / "shown"
    environment = {"PATH": f"{programs}", "SHOWN": str(written)}
    subprocess.run(["/bin/bash", "-eu", "-c", text], env=environment, cwd=folder, check=True)
    return [tuple(json.loads(line)) for line in written.read_text().splitlines()]
