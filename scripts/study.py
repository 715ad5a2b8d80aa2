"""What the studies share: measuring in the ranks of another Python, and writing what was measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.common.markdown import Table
from scripts.common.process import ROOT, environment, run_or_exit

DONE = "done: "  # begins the line that says which part of a study is done


def measure(
    python: str,
    module: str,
    *words: object,
    ranks: int = 1,
    device: str | None = None,
    patches: str = "all",
    on_done: Callable[[str], object] = lambda part: None,
) -> Any:
    """Run `python -m MODULE FILE WORDS` on these ranks; return the JSON that it wrote to FILE.

    Args:
        device: "cpu" or "gpu", to have `megatron-mtp-patches run` prepare the process; else it does that itself.
        on_done: is given each part that `MODULE` has printed with `tell_done`.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", module]
    if device:
        script = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        kind = "cuda" if device == "gpu" else device
        program = ["-m", "megatron_mtp_patches", "run", "--device", kind, str(script)]

    def on_line(line: str) -> None:
        if line.startswith(DONE):
            on_done(line.removeprefix(DONE))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        command = [python, "-W", "ignore", *launcher, *program, str(file), *map(str, words)]
        run_or_exit(command, environment(patches, TORCHDYNAMO_DISABLE="1"), on_line=on_line)
        return json.loads(file.read_text(encoding="utf-8"))


def tell_done(part: object) -> None:
    """Print on rank 0 which part is done."""
    print(f"{DONE}{part}", flush=True)


def write(file: Path, record: Any, title: str, tables: Iterable[Table]) -> None:
    """Write FILE.json and FILE.md."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_name(f"{file.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    file.with_name(f"{file.name}.md").write_text(page(title, tables), encoding="utf-8")


def page(title: str, tables: Iterable[Table]) -> str:
    """The Markdown of the tables; one that has the title of the page gets no heading."""
    lines = [f"# {title}", ""]
    for table in tables:
        lines += table.section()[2 * (table.title == title) :]
    return "\n".join(lines)


def versions(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            pass
    return found
