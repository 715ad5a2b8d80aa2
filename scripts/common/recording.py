"""Measure something on the ranks of one release, in another Python, and keep what was found as JSON and as a table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import Progress

from scripts.common.markdown import Table
from scripts.common.process import environment, run_or_exit

_MEASURED = "measured "


def report_measured(what: object) -> None:
    """Print on rank 0 which part is done; `record_on_ranks` shows it."""
    print(f"{_MEASURED}{what}", flush=True)


def record_on_ranks(python: str, module: str, ranks: int, patches: str, progress: Progress) -> Any:
    """Run `python -m MODULE FILE` on `ranks` ranks with these patches; return the JSON that rank 0 wrote to FILE."""

    def on_line(line: str) -> None:
        if line.startswith(_MEASURED):
            progress.console.print(line.removeprefix(_MEASURED), highlight=False)

    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [*launcher, "-m", module, str(file)]
        run_or_exit(command, environment(patches, TORCHDYNAMO_DISABLE="1"), on_line=on_line)
        return json.loads(file.read_text(encoding="utf-8"))


def keep(folder: Path, table: Table, found: Any) -> None:
    """Print the table, and write it and what it was made of to `folder`."""
    table.show()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.md").write_text("\n".join(["# " + table.title, "", *table.section()[2:]]), encoding="utf-8")
    (folder / "cpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
