"""What the tables that are kept under ci/ say, in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.megatrons.known import DEFAULT, REFERENCE

from scripts import alarms, resumes, study
from scripts.acceptance import table as accepted
from scripts.common.markdown import table
from scripts.common.process import ROOT
from scripts.common.toml import read_toml
from scripts.gpu import pages
from scripts.parity_scores.table import make_block, make_sentence, read_scores
from scripts.pins.table import by_patch, make_page
from scripts.replay.report import read_totals
from scripts.replay.verdicts import VERDICTS
from scripts.watch_scores import table as watched

CI = ROOT / "ci"


def blocks() -> dict[str, str]:
    return {
        "cost": cost(_read("bench")),
        "losses": "\n".join(accepted.losses(_read("acceptance")).lines()),
        "acceptance": "\n".join(accepted.logged(_read("acceptance")).lines()),
        "starts": "\n".join(accepted.starts(_read("starts")).lines()),
        "pins": pins(),
        "alarms": alarms.make_table(alarms.read_rows()),
        "resumes": resumes.make_table(resumes.read_answers()),
        "parity-scores": make_block(read_scores()),
        "parity-score": make_sentence(read_scores(), DEFAULT),
        "watch-scores": "\n".join(watched.make_table(watched.read_scores())),
        "watch-flips": "\n".join(watched.make_table_of_flips(watched.read_scores())),
        "replays": replays("cpu-transformer-engine", 1),
        "replays-on-2-ranks": replays("cpu-transformer-engine-2-ranks", 2),
        "gpu": pages.sentence(pages.read_kept(), docs="docs/", ci="ci/"),
        "gpu-page": pages.sentence(pages.read_kept(), docs="", ci="../ci/"),
    }


def replays(folder: str, ranks: int) -> str:
    """How many of upstream's unit tests have which verdict with each Megatron."""
    rows = [
        [f"[{page.stem}](../ci/replay/{folder}/{page.name})", *(f"{n:,}" for n in read_totals(page, ranks).values())]
        for page in sorted((CI / "replay" / folder).glob("*.md"))
    ]
    return "\n".join(table([study.count_ranks(ranks), *VERDICTS], rows))


def pins() -> str:
    """The results of `python -m scripts.pins`."""
    return make_page(read_toml(CI / "pins.toml")["pin"], _read_pins())


def pins_by_patch() -> str:
    """The same for each patch, for the site."""
    return by_patch(_read_pins(), [patch.id for patch in CATALOG if not patch.package])


def _read_pins() -> list[dict[str, Any]]:
    return json.loads((CI / "pins.json").read_text(encoding="utf-8"))


def cost(record: dict[str, Any]) -> str:
    """Of what `python -m scripts.bench` found: ratios, and how many rows meet the target."""
    rows = record["step"]
    ranks = ", ".join(map(str, sorted({row["ranks"] for row in rows})))
    missing = [row["ranks"] for row in rows if row["misses"]]
    others = f" (the others have {', '.join(map(str, sorted(set(missing))))} ranks)" if missing else ""
    met = f"{len(rows) - len(missing)} of {len(rows)} rows meet the target, at most 1.00{others}"
    twice = _range(row["unpatched / native"] for row in rows if row["release"] == REFERENCE)
    native, ours = (
        " or ".join(sorted({f"{row['a step'][side]['all_reduces']:g}" for row in rows}))
        for side in (f"native {REFERENCE}", "patched")
    )
    import_ms, apply_s = (max(row[what] for row in record["import"]) for what in ("ms", "apply s"))
    return "\n".join(
        [
            f"On {ranks} CPU ranks optimizer.step takes {_range(row['patched / native'] for row in rows)} of native "
            f"{REFERENCE}'s time; {met};",
            f"native {REFERENCE}, started twice, takes {twice} of the time of its first run. It takes "
            f"{_range(row['patched / unpatched'] for row in rows)} of the time of the same release unpatched.",
            f"All-reduces in a step: {ours}; native has {native}.",
            f"The import takes {import_ms:.0f} ms of CPU time, apply() {apply_s:.2f} s on each rank once Megatron is "
            f"imported.",
        ]
    )


def _read(folder: str) -> Any:
    return json.loads((CI / folder / "cpu.json").read_text(encoding="utf-8"))


def _range(ratios: Iterable[dict[str, float]]) -> str:
    medians = [ratio["median"] for ratio in ratios]
    return f"{min(medians):.2f} to {max(medians):.2f}"
