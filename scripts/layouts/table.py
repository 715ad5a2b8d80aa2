"""ci/layouts: the result of each layout on each Megatron, as JSON and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.markdown import Table

from . import cases

TOLERANCE = 5e-3  # losses start at 4.9; bf16 activations, and the bf16 moments of one layout, cause most of it
HEADER = ["layout", "ranks", "loss", "reference", "largest difference", "resumes", "verify-mtp"]
TITLE = "Parallel layouts with TransformerEngine's layers"
ABOUT = (
    "Made by `python -m scripts.layouts`: upstream's unmodified pretrain_gpt.py in a rehearsal on CPU ranks, with two "
    "MTP heads, `--mtp-detach-heads` and `--mtp-clip-grad 0.05`. TransformerEngine's Python is real, its kernels are "
    "replaced by stand-ins in torch. Nothing here was compared with a GPU.\n\n"
    f"Loss: the loss of the main model at iteration {cases.ITERATIONS}. Reference: the same training with "
    "`--transformer-impl local`, without the flags that need TransformerEngine. For context parallelism, which "
    "Megatron does not allow with local layers, the reference is one rank. Largest difference: over all losses of all "
    f"iterations; at most {TOLERANCE} is accepted. It includes the losses of the MTP heads, except with packed "
    "samples: there Megatron logs a mean over all ranks, including those that have no counted token. Resumes: training "
    f"from iteration {cases.SAVED_AT} prints the same numbers to the last digit."
)


def add(folder: Path, release: str, about: dict[str, str], layouts: dict[str, dict[str, Any]]) -> None:
    """Write the results of one Megatron into cpu.json and cpu.md.

    Results of layouts that did not run this time stay, unless they were made with other versions than those in `about`.
    """
    file = folder / "cpu.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    before = record.get(release, {})
    together = (before["layouts"] if before.get("about") == about else {}) | layouts
    names = [layout.name for layout in cases.LAYOUTS if layout.name in together]
    record[release] = {"about": about, "layouts": {name: together[name] for name in names}}
    record = dict(sorted(record.items()))
    study.write(folder / "cpu", record, TITLE, make_tables(record), ABOUT)


def is_good(result: dict[str, Any]) -> bool:
    if result["error"] or not result["losses"]:
        return not result["error"] and bool(result["left_out"])
    resumes = result["resumes"] or bool(result["left_out"])
    return resumes and result["verified"] and (result["difference"] or 0.0) <= TOLERANCE


def make_tables(record: dict[str, Any]) -> list[Table]:
    """A table for each Megatron of cpu.json."""
    return [
        Table(
            release,
            HEADER,
            [_row(name, result) for name, result in part["layouts"].items()],
            right=range(1, 5),
            note=", ".join(f"{package} {version}" for package, version in part["about"].items()) + ".",
        )
        for release, part in record.items()
    ]


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
