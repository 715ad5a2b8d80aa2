"""Train MTP heads by each loss from one frozen main model, and compare accepted lengths in the log and in a decoder.

    python -m scripts.acceptance [--out ci/acceptance] [--figure docs/mtp_acceptance_length.png]

Trains a small GPT on the bytes of the standard library (CPU, one process, 20 minutes), then its heads by each
--mtp-loss-type for the same steps. Draws the accepted length over the steps on held-out text; decodes with a small
speculative decoder, greedily and by rejection sampling, and compares with what the log says. Needs torch, megatron-core
and matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts import study
from scripts.acceptance import training
from scripts.acceptance.table import columns, numbers
from scripts.common.arguments import make_parser
from scripts.common.markdown import Table
from scripts.common.process import ROOT

PROMPT, SAMPLES = 16, 8
LOSSES = ("cross_entropy", "kl", "tv", "e2e_tv")
GREEDY, SAMPLED = "mtp greedy acceptance length", "mtp acceptance length"


def main() -> int:
    parser = make_parser("scripts.acceptance", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "acceptance", help="folder of the table")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "mtp_acceptance_length.png")
    options = parser.parse_args()
    console = Console()
    found = {}
    with training.trained_main_model(console) as trained:
        for loss_type in LOSSES:
            console.print(f"training the heads: {loss_type}")
            model, curve = training.train_heads(*trained, loss_type)
            found[loss_type] = {"curve": curve, **decode(model, trained.held_out)}
            console.print({name: value for name, value in found[loss_type].items() if name != "curve"})
    study.keep(options.out, make_table(found), found)
    draw(found, options.figure)
    return 0


def decode(model: Any, held_out: Any) -> dict[str, float]:
    """Return tokens per verification step: decoded, from every position of the decoded text, and as the log says."""
    import torch

    from scripts.acceptance.decoder import accepted_from_every_position
    from scripts.acceptance.decoder import decode as decode_text

    begins = range(0, SAMPLES * 500, 500)
    prompts = torch.stack([held_out[begin : begin + PROMPT] for begin in begins])
    found = {}
    for name, logged, sampler in (
        ("greedy", GREEDY, None),
        ("sampled", SAMPLED, torch.Generator().manual_seed(5)),
    ):
        decoded = decode_text(model, prompts, training.LENGTH, sampler)
        found[f"{name}, decoded"] = decoded.tokens_per_step
        found[f"{name}, from every position"] = accepted_from_every_position(model, decoded.tokens, PROMPT, sampler)
        found[f"{name}, logged"] = training.measure_text(model, decoded.tokens, PROMPT)[logged]
        found[f"{name}, logged on held-out text"] = training.measure(model, held_out)[logged]
    return found


def make_table(found: dict[str, dict[str, Any]]) -> Table:
    """The rows of table.py, and how they were made."""
    note = (
        f"Tokens per verification step of a speculative decoder with {training.DEPTHS} heads, after "
        f"{training.HEAD_STEPS} steps of training the heads by each loss from one frozen main model. Decoded: "
        f"{SAMPLES} texts of {training.LENGTH} bytes. From every position: drafts begin after each token of the "
        f"decoded text; logged: what the log says of that text. Made by `python -m scripts.acceptance` with "
        f"{study.made_with()} on a CPU."
    )
    return Table("Accepted lengths, logged and decoded", columns(found), numbers(found), note=note)


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw the accepted lengths on held-out text over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    colors = dict(zip(LOSSES, ("#8a8a8a", "#c99700", "#1f6fb2", "#c8452f"), strict=True))
    for axis, name in zip(axes, (SAMPLED, GREEDY), strict=True):
        for loss_type, one in found.items():
            steps = [step for step, _ in one["curve"]]
            axis.plot(steps, [metrics[name] for _, metrics in one["curve"]], color=colors[loss_type], label=loss_type)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("steps of training the heads")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens per verification step")
    axes[1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
