"""What the tables that are kept under ci/ say, in a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from statistics import mean
from typing import Any

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.defects.catalog import known_defects, read_releases
from megatron_mtp_patches.megatrons import DEFAULT, REFERENCE

from scripts.acceptance import table as accepted
from scripts.bench import frozen as price
from scripts.common.markdown import table
from scripts.common.process import ROOT
from scripts.common.toml import read_toml
from scripts.evidence import make_experts
from scripts.pins.table import make_page

CI = ROOT / "ci"
SHOWN = re.compile(r"(, bias)?, (adam|dist_muon)(: copies of an expert, apart)?")  # of the rows of ci/experts


def blocks() -> dict[str, str]:
    return {
        "gains": gains(_read("acceptance"), _read("frozen")["found"]),
        "cost": cost(_read("bench")),
        "experts": experts(_read("experts")),
        "losses": "\n".join(accepted.losses(_read("acceptance")).lines()),
        "acceptance": "\n".join(accepted.logged(_read("acceptance")).lines()),
        "starts": "\n".join(accepted.starts(_read("starts")).lines()),
        **{kind: price_of(kind, _read(kind)) for kind in price.KINDS},
        "pins": pins(),
    }


def gains(lengths: accepted.Runs, price: dict[str, dict[str, float]]) -> str:
    """Three numbers: known defects, accepted lengths of held-out text, and the time of a step of heads alone."""
    answers = read_releases()[DEFAULT]
    defects = [defect for defect in known_defects() if answers[defect.id]]
    removed = sum(bool(defect.patch) for defect in defects)
    before, after = (mean(run["sampled, held out"] for run in lengths[loss]) for loss in ("cross_entropy", "e2e_tv"))
    ratio = price["frozen"]["milliseconds"] / price["detached"]["milliseconds"]
    rows = [
        [f"[known defects](docs/known-defects.md) left in {DEFAULT}", str(len(defects)), str(len(defects) - removed)],
        [
            "[tokens per step](docs/train-mtp-heads-for-acceptance.md#which-loss) of speculative "
            "decoding by sampling, 3 heads, estimated on held-out text",
            f"{before:.3f}",
            f"{after:.3f}",
        ],
        [
            "[time of a step](docs/freeze-base-model-for-mtp.md#figures) of heads for a trained model",
            "1",
            f"{ratio:.2f}",
        ],
    ]
    return "\n".join(table(["", "without", "with the patches"], rows, right=(1, 2)))


def pins() -> str:
    """What `python -m scripts.pins` found."""
    states = json.loads((CI / "pins.json").read_text(encoding="utf-8"))
    return make_page(read_toml(CI / "pins.toml")["pin"], states, [patch.id for patch in CATALOG if not patch.package])


def price_of(kind: str, record: dict[str, Any]) -> str:
    """What `python -m scripts.bench frozen --kind KIND` found."""
    return "\n".join(table(price.columns(kind), price.rows(kind, record["found"], record["theory"]), right=range(1, 5)))


def experts(columns: list[dict[str, Any]]) -> str:
    """Of ci/experts: two of the optimizers, without a separate MTP norm; replicas."""
    whole = make_experts(columns)
    numbers = [number for number, name in enumerate(whole.columns) if name != "patched"]
    rows = [[row[number] for number in numbers] for row in whole.rows if SHOWN.fullmatch(row[0], row[0].index(","))]
    return "\n".join(table([whole.columns[number] for number in numbers], rows))


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
