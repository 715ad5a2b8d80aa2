"""docs/engine.md runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
RUN = """
import doctest, sys
sys.exit(doctest.testfile("session.txt", module_relative=False, optionflags=doctest.ELLIPSIS).failed)
"""


def test_the_page_runs_as_it_stands(tmp_path):
    session = []
    for block in BLOCKS:
        file = re.match(r"# (\S+\.py)\n", block)
        if file:
            (tmp_path / file[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file[1]).write_text(block)
        else:
            session.append(block)
    assert len(session) == 3 and len(BLOCKS) == 7
    (tmp_path / "session.txt").write_text("\n".join(session))
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1] / "patches")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
