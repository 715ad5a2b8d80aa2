"""How many known defects `doctor` names in many runs: of a Megatron's own recipes, or of any files that it reads.

    python -m scripts.alarms "recipes of 0.19.2" CHECKOUT/tests/functional_tests/test_cases/*/*/model_config.yaml

Run it with the Python of the Megatron that is asked, outside a checkout of Megatron; that of 0.16.1 needs one on
PYTHONPATH. A run that does not say its number of ranks has 8, or else 64, or else as few as fit. Adds a row to
ci/alarms.json, from which `python -m scripts.docs` makes the table of docs/doctor.md. A minute for 300 recipes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_mtp_patches.cli.doctor_output import FAILS_FROM
from megatron_mtp_patches.doctor.findings import Finding, RunSettings, find_defects
from megatron_mtp_patches.doctor.flags import read
from megatron_mtp_patches.doctor.launch_script import Command
from megatron_mtp_patches.doctor.run_files import read_runs
from megatron_mtp_patches.engine import UsageError
from megatron_mtp_patches.parity.trainer import import_trainer, prepare, silence

from scripts.common.markdown import table
from scripts.common.process import ROOT

KEPT = ROOT / "ci" / "alarms.json"
RANKS = (8, 64, None)


def find_in_files(files: list[Path], version: str | None) -> Iterator[list[Finding] | None]:
    """Yield the defects of each run, or None for a file or a run that cannot be read."""
    for file in files:
        try:
            runs = read_runs(file)
        except UsageError:
            yield None
            continue
        for _, run in runs:
            if not isinstance(run, Command):
                ranks = SimpleNamespace(world_size=RANKS[1])
                yield list(find_defects(RunSettings([*run.sources, ranks], version)))
                continue
            sources = _read_flags(run)
            yield None if sources is None else list(find_defects(RunSettings([run.settings, *sources], version)))


def _read_flags(run: Command) -> list[object] | None:
    for ranks in (run.world_size(), *RANKS) if run.world_size() else RANKS:
        try:
            with silence():
                return read(run.flags, ranks).sources
        except UsageError:
            continue
    return None


def count(runs: list[list[Finding] | None]) -> dict[str, Any]:
    """How many runs were read, have no severe defect, and have how many of each severity and of the most frequent."""
    readable = [findings for findings in runs if findings is not None]
    findings = [one for run in readable for one in run]
    severe = Counter(one.id for one in findings if one.severity >= FAILS_FROM)
    return {
        "read": len(readable),
        "not read": len(runs) - len(readable),
        "without severe": sum(all(one.severity < FAILS_FROM for one in run) for run in readable),
        "severities": {str(n): sum(one.severity == n for one in findings) for n in range(5, 0, -1)},
        "severe": dict(severe.most_common(4)),
    }


def read_rows() -> dict[str, dict[str, Any]]:
    """{name of a set of runs: its row}, as they are kept."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Of each set of runs what `count` has counted."""
    head = ["runs", "read", "not read", "none of severity 3 or more", "named per run, by severity 5 / 4 / 3 / 2 / 1"]
    body = [
        [
            name,
            str(row["read"]),
            str(row["not read"]),
            str(row["without severe"]),
            " / ".join(f"{n / max(1, row['read']):.2f}" for n in row["severities"].values()),
            ", ".join(f"{id} ({n})" for id, n in row["severe"].items()),
        ]
        for name, row in rows.items()
    ]
    return "\n".join(table([*head, "most frequent from severity 3 on"], body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the row")
    parser.add_argument("files", nargs="+", type=Path)
    asked = parser.parse_args()
    version, _ = prepare(None, None)
    import_trainer(version)
    row = count(list(find_in_files(asked.files, version)))
    KEPT.write_text(json.dumps(read_rows() | {asked.name: row}, indent=1) + "\n", encoding="utf-8")
    print(make_table({asked.name: row}))


if __name__ == "__main__":
    main()
