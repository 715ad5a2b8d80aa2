"""ci/layouts: the result of each layout on each Megatron, as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.common.markdown import table

from . import cases
from .training import Result

TOLERANCE = 5e-3  # losses start at 4.9; bf16 activations, and the bf16 moments of one layout, cause most of it
HEADER = ("layout", "ranks", "loss", "reference", "largest difference", "resumes", "verify-mtp")


def add(folder: Path, release: str, about: dict[str, str], layouts: dict[str, dict[str, Any]]) -> None:
    """Write the results of one Megatron into cpu.json and cpu.md.

    Results of layouts that did not run this time stay, unless they were made with other versions than those in `about`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cpu.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    before = record.get(release, {})
    kept = before.get("layouts", {}) if before.get("about") == about else {}
    order = {layout.name: number for number, layout in enumerate(cases.LAYOUTS)}
    together = kept | layouts
    record[release] = {"about": about, "layouts": {name: together[name] for name in sorted(together, key=order.get)}}
    record = dict(sorted(record.items()))
    page = markdown(record)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "cpu.md").write_text(page, encoding="utf-8")


def markdown(record: dict[str, Any]) -> str:
    """Return the page for the contents of cpu.json."""
    return "\n".join(_lines(record)) + "\n"


def is_good(result: dict[str, Any]) -> bool:
    return Result(**result).is_good(TOLERANCE)


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield "# Parallel layouts with TransformerEngine's layers"
    yield ""
    yield (
        "Made by `python -m scripts.layouts`: upstream's unmodified pretrain_gpt.py in a rehearsal on CPU ranks, "
        "with two MTP heads, `--mtp-detach-heads` and `--mtp-clip-grad 0.05`. TransformerEngine's Python is real, "
        "its kernels are replaced by stand-ins in torch. Nothing here was compared with a GPU."
    )
    yield ""
    yield (
        f"Loss: the loss of the main model at iteration {cases.ITERATIONS}. Reference: the same training with "
        f"`--transformer-impl local`, without the flags that need TransformerEngine. For context parallelism, which "
        f"Megatron does not allow with local layers, the reference is one rank. Largest difference: over all losses of "
        f"all iterations; at most {TOLERANCE} is accepted. It includes the losses of the MTP heads, except with packed "
        f"samples: there Megatron logs a mean over all ranks, including those that have no counted token. Resumes: "
        f"training from iteration {cases.SAVED_AT} prints the same numbers to the last digit."
    )
    for release, row in record.items():
        yield from ("", f"## {release}", "", ", ".join(f"{key} {value}" for key, value in row["about"].items()) + ".")
        yield ""
        rows = [_row(name, result) for name, result in row["layouts"].items()]
        yield from table(HEADER, rows, right=range(1, 5))


def _row(name: str, result: dict[str, Any]) -> list[str]:
    if why := result["error"] or (not result["losses"] and result["left_out"]):
        return [name, str(result["ranks"]), "", "", "", f"does not train: {why.splitlines()[0]}", ""]
    difference = result["difference"]
    return [
        name,
        str(result["ranks"]),
        f"{result['losses'][-1]:.6f}",
        f"{result['reference'][-1]:.6f}" if result["reference"] else "",
        "" if difference is None else f"{difference:.6f}",
        "yes" if result["resumes"] else f"no: {result['left_out']}",
        "passes" if result["verified"] else "fails",
    ]
