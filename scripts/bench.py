#!/usr/bin/env python3
"""What the patches cost, as ratios measured side by side; medians only.

    scripts/bench.py [step] [import] [acceptance] --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [--ranks 1,2]

step: optimizer.step of thousands of parameters, unpatched and patched on each release and native on 0.19.2, taking
turns of one step, their processes started several times; all-reduces, waits of the host for the device and, on a GPU,
kernel launches of a step. On 0.19.2 unpatched and native are the same, started twice: what they differ by is noise.
import: `import megatron_mtp_patches` in a fresh interpreter, and apply() in one that has imported Megatron, in CPU
time. acceptance: counting what an MTP head guesses right, against one read of its logits. Without --python the Python
that runs this is measured. A row that misses its target says so. Leave the machine to it: steps are measured by the
clock on the wall.
`scripts/bench_memory.py` counts bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from pythons import REFERENCE, numbers, positive, release_and_python

sys.path.insert(0, str(Path(__file__).parent / "bench"))

ROWS = ("step", "import", "acceptance")
OUT = "write DEVICE.json and DEVICE.md there; what is not measured stays as it is there"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; without one, all")
    parser.add_argument("--python", type=release_and_python, action="append", metavar="RELEASE=PYTHON")
    parser.add_argument("--ranks", type=numbers, default=[1])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--parameters", type=positive, default=2000, help="how many the optimizer has (default: 2000)")
    parser.add_argument("--starts", type=positive, default=3, help="of all processes (default: 3)")
    parser.add_argument("--turns", type=positive, default=50, help="steps of each Megatron in a start (default: 50)")
    parser.add_argument("--tokens", type=positive, default=64, help="rows of the logits (default: 64)")
    parser.add_argument("--vocabulary", type=positive, default=131072, help="their columns (default: 131072)")
    parser.add_argument("--out", type=Path, metavar="DIR", help=OUT)
    options = parser.parse_args()
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    options.rows = options.rows or list(ROWS)
    try:
        options.python = dict(options.python or [(metadata.version("megatron-core"), sys.executable)])
    except metadata.PackageNotFoundError:
        parser.error(f"{sys.executable} has no megatron-core; give --python RELEASE=PYTHON")
    if options.device == "gpu" and not device_name("gpu"):
        parser.error("--device gpu: torch finds no GPU here; --device cpu rehearses without one")
    return options


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """{row: what was found}; versions under "about"."""
    import measure as rows
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from step import CASES

    found: dict[str, Any] = {"about": {"device": device_name(options.device)}}
    newest = REFERENCE if REFERENCE in options.python else list(options.python)[-1]
    steps = len(options.python) * len(options.ranks) * len(CASES) * options.starts
    turns = {"step": steps, "import": len(options.python), "acceptance": 1}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress, tempfile.TemporaryDirectory() as folder:
        bar = progress.add_task("starting", total=sum(turns[row] for row in options.rows))

        def tell(text: str) -> None:
            progress.update(bar, description=text, advance=1)

        if "import" in options.rows:  # first: nothing else of ours runs
            found["import"] = []
            for release, python in options.python.items():
                tell(f"import, {release}")
                found["import"].append(rows.imports(release, python))
        if "step" in options.rows:
            found["step"] = []
            sizes = options.device, options.parameters, options.starts, options.turns
            versions = found["about"]["versions"] = {}
            native = options.python.get(REFERENCE)
            for ranks in options.ranks:
                for release, python in options.python.items():
                    words = release, python, native, ranks, *sizes, Path(folder), tell
                    versions[release], some = rows.steps(*words)
                    found["step"] += some
        if "acceptance" in options.rows:
            tell("acceptance")
            shape = options.tokens, options.vocabulary, Path(folder)
            found["acceptance"] = [rows.acceptance(newest, options.python[newest], options.device, *shape)]
    return found


def keep_others(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """`found`, with the rows in `file` that were not measured now."""
    if not file.is_file():
        return found
    before = json.loads(file.read_text(encoding="utf-8"))
    return {**before, **found, "about": {**before["about"], **found["about"]}}


def device_name(device: str) -> str:
    if device == "cpu":
        return "the CPU (rehearsal)"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> None:
    options = read_arguments()
    found = measure(options)
    from bench_tables import tables

    for table in tables(found):
        table.show()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        found = keep_others(options.out / f"{options.device}.json", found)
        made = tables(found)
        lines = [f"# What the patches cost on {found['about']['device']}", ""]
        text = "\n".join([*lines, *(line for table in made for line in table.markdown())])
        (options.out / f"{options.device}.md").write_text(text, encoding="utf-8")
        (options.out / f"{options.device}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
