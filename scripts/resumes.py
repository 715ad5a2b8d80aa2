"""Whether resumes go on as the run did: each layout of ci/resumes.toml in each format of checkpoints, with all patches.

    python -m scripts.resumes CHECKOUT [--only LAYOUT ...]

Run it with the Python of the release whose checkout of Megatron-LM this is. Adds the release to ci/resumes.json, from
which `python -m scripts.docs` makes the table of docs/parity.md. Half an hour for a release.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_mtp_patches
from megatron_mtp_patches.engine import UsageError

from scripts.common.markdown import table
from scripts.common.process import ROOT
from scripts.common.toml import read_toml
from scripts.study import installed_release

if TYPE_CHECKING:
    from megatron_mtp_patches.parity.resume import Resume

LAYOUTS, KEPT = ROOT / "ci" / "resumes.toml", ROOT / "ci" / "resumes.json"
MOST_RANKS = 4
Cell = dict[str, Any]


def try_formats(layout: dict[str, Any], listed: dict[str, Any], checkout: Path) -> dict[str, Cell]:
    """{format: what came of the resumes of this layout}."""
    from megatron_mtp_patches.parity.cuts import list_cuts  # they need torch, which a table does not
    from megatron_mtp_patches.parity.processes import prepare
    from megatron_mtp_patches.parity.resume import try_resumes
    from megatron_mtp_patches.parity.small import shrink
    from megatron_mtp_patches.parity.study import Study

    script = str(checkout / layout.get("script", "pretrain_gpt.py"))
    prepare(script)
    words = [part for word in layout["flags"].split() for part in shlex.split(listed["parts"].get(word, word))]
    study = None
    cells: dict[str, Cell] = {}
    for ckpt_format in listed["formats"]:
        small = shrink([*words, "--ckpt-format", ckpt_format], "bf16")
        try:
            study = study or Study(script, small, "uneven")
        except UsageError as error:
            cells[ckpt_format] = {"tried": 1, "defined": [], "differ": {}, "refused": {"": str(error)}, "known": {}}
            continue
        study.small = small  # the run on one rank that it has trained is the same
        cuts = [cut for cut in list_cuts(small, MOST_RANKS) if cut.name in layout["cuts"]]
        cells[ckpt_format] = summarize(try_resumes(study, cuts))
        print(f"{layout['name']}, {ckpt_format}: {json.dumps(cells[ckpt_format])}", flush=True)
    return cells


def summarize(resumes: Iterable[Resume]) -> Cell:
    """How many were tried, what differs first, the errors of refusals, and which known defects explain either."""
    cell: Cell = {"tried": 0, "defined": [], "differ": {}, "refused": {}, "known": {}}
    for one in resumes:
        cell["tried"] += 1
        name = f"{one.saved.name} to {one.loaded.name}"
        if one.refusal:
            cell["refused"][name] = one.refusal
        elif one.deviations:
            cell["differ"][name] = str(one.deviations[0])
        elif one.dependences:
            cell["defined"].append(name)
        if one.explanations:
            cell["known"][name] = [defect.id for defect in one.explanations]
        if one.refusal and cell["tried"] == 1:
            break  # one rank cannot resume in this format, so no other can
    return cell


def read_answers() -> dict[str, dict[str, dict[str, Cell]]]:
    """{release: {layout: {format: cell}}}, as they are kept."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def make_table(answers: dict[str, dict[str, dict[str, Cell]]]) -> str:
    """Of each layout and format how many resumes are equal in each release, and below it the errors of refusals."""
    listed = read_toml(LAYOUTS)
    errors: dict[str, int] = {}
    rows = []
    for layout in listed["layout"]:
        row = [f"{layout['name']}: {', '.join(layout['cuts'])}"]
        for ckpt_format in listed["formats"]:
            texts: dict[str, list[str]] = {}
            for release, layouts in sorted(answers.items()):
                if cell := layouts.get(layout["name"], {}).get(ckpt_format):
                    texts.setdefault(_describe(cell, errors), []).append(release)
            parts = (f"{', '.join(releases)}: {text}" for text, releases in texts.items())
            row.append(next(iter(texts)) if len(texts) == 1 else "; ".join(parts))
        rows.append(row)
    notes = (f"{number}. `{error}`" for error, number in errors.items())
    head = f"layout, with {', '.join(sorted(answers))}"
    return "\n".join([*table([head, *listed["formats"]], rows), "", *notes])


def _describe(cell: Cell, errors: dict[str, int]) -> str:
    texts = sorted({re.sub(r"\b\d+\b", "N", error.replace("`", "'")) for error in cell["refused"].values()})
    numbers = sorted({errors.setdefault(text, len(errors) + 1) for text in texts})
    why = ", ".join(filter(None, [*map(str, numbers), _name_known(cell, "refused")]))
    others = {what: len(cell[what]) for what in ("defined", "differ", "refused")}
    several = {
        "equal": cell["tried"] - sum(others.values()),
        "as Megatron defines it": others["defined"],
        f"differ ({_name_known(cell, 'differ')})": others["differ"],
        f"refused ({why})": others["refused"],
    }
    return ", ".join(what if n == cell["tried"] else f"{n} {what}" for what, n in several.items() if n)


def _name_known(cell: Cell, what: str) -> str:
    ids = {defect for name in cell[what] for defect in cell["known"].get(name, ())}
    return ", ".join(sorted(ids)) or ("unexplained" if what == "differ" else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of Megatron-LM, for the scripts that train")
    parser.add_argument("--only", action="append", metavar="LAYOUT", help="by its name")
    asked = parser.parse_args()
    os.environ["MEGATRON_MTP_PATCHES_DEFECTS"] = "off"
    megatron_mtp_patches.apply("all")
    listed = read_toml(LAYOUTS)
    for layout in listed["layout"]:
        if asked.only and layout["name"] not in asked.only:
            continue
        cells = try_formats(layout, listed, asked.checkout.absolute())
        answers = read_answers()
        answers.setdefault(installed_release(), {})[layout["name"]] = cells
        KEPT.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
