"""Train MTP heads from one frozen main model, and compare accepted lengths: by each loss, and from each --mtp-init.

    python -m scripts.acceptance [losses] [starts] [--out DIR]      without a word, both

Trains a small GPT on the bytes of the standard library (CPU, one process, 20 minutes), then its heads: by each
--mtp-loss-type for the same steps (`losses`), by e2e_tv from both values of --mtp-init (`starts`). Draws the accepted
length over the steps on held-out text. With `losses`, decodes with a small speculative decoder, greedily and by
rejection sampling, and compares with what the log says. Writes ci/acceptance, ci/starts and their pictures in docs, or
all of it to DIR. Needs torch, megatron-core and matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts import study
from scripts.acceptance import table, training
from scripts.common.arguments import make_parser, one_of
from scripts.common.process import ROOT

PROMPT, SAMPLES = 16, 8
LOSSES = ("cross_entropy", "kl", "tv", "e2e_tv")
GREEDY, SAMPLED = "mtp greedy acceptance length", "mtp acceptance length"
Curves = dict[str, list[tuple[int, dict[str, float]]]]  # by run: the metrics after so many steps


def main() -> int:
    parser = make_parser("scripts.acceptance", __doc__)
    parser.add_argument("studies", nargs="*", type=one_of(STUDIES), metavar="losses|starts", default=[*STUDIES])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the tables and pictures")
    options = parser.parse_args()
    console = Console()
    with training.trained_main_model(console) as trained:
        for name in options.studies:
            STUDIES[name](trained, console, options.out or ROOT / "ci", options.out or ROOT / "docs")
    return 0


def compare_losses(trained: training.Trained, console: Console, tables: Path, pictures: Path) -> None:
    lengths = {}
    for loss_type in LOSSES:
        console.print(f"training the heads: {loss_type}")
        model, curve = training.train_heads(*trained, loss_type)
        lengths[loss_type] = {"curve": curve, **decode(model, trained.held_out)}
    note = (
        f"Tokens per verification step of a speculative decoder with {training.DEPTHS} heads, after "
        f"{training.HEAD_STEPS} steps of training the heads by each loss from one frozen main model. Decoded: "
        f"{SAMPLES} texts of {training.LENGTH} bytes. From every position: drafts begin after each token of the "
        f"decoded text; logged: what the log says of that text. Made by `python -m scripts.acceptance` with "
        f"{study.made_with()} on a CPU."
    )
    study.keep(tables / "acceptance", table.losses(lengths, note), lengths)
    curves = {loss_type: row["curve"] for loss_type, row in lengths.items()}
    draw(curves, (SAMPLED, GREEDY), pictures / "mtp_acceptance_length.png")


def compare_starts(trained: training.Trained, console: Console, tables: Path, pictures: Path) -> None:
    curves: Curves = {}
    for start in ("random", "last-layer"):
        console.print(f"training the heads: --mtp-init {start}")
        _, curves[start] = training.train_heads(*trained, "e2e_tv", start)
    lengths = {start: [(step, metrics[SAMPLED]) for step, metrics in curve] for start, curve in curves.items()}
    note = (
        f"The accepted length ({SAMPLED}) of {training.DEPTHS} heads on held-out text, over the steps of training them "
        f"by e2e_tv. Made by `python -m scripts.acceptance starts` with {study.made_with()} on a CPU."
    )
    study.keep(tables / "starts", table.starts(lengths, note), lengths)
    draw({f"--mtp-init {start}": curve for start, curve in curves.items()}, (SAMPLED,), pictures / "mtp_starts.png")


STUDIES = {"losses": compare_losses, "starts": compare_starts}


def decode(model: Any, held_out: Any) -> dict[str, float]:
    """Return tokens per verification step: decoded, from every position of the decoded text, and as the log says."""
    import torch

    from scripts.acceptance import decoder

    begins = range(0, SAMPLES * 500, 500)
    prompts = torch.stack([held_out[begin : begin + PROMPT] for begin in begins])
    lengths = {}
    samplers = {"greedy": (GREEDY, None), "sampled": (SAMPLED, torch.Generator().manual_seed(5))}
    for name, (logged, sampler) in samplers.items():
        text, lengths[f"{name}, decoded"] = decoder.decode(model, prompts, training.LENGTH, sampler)
        lengths[f"{name}, from every position"] = decoder.accepted_from_every_position(model, text, PROMPT, sampler)
        lengths[f"{name}, logged"] = training.measure_text(model, text, PROMPT)[logged]
        lengths[f"{name}, logged on held-out text"] = training.measure(model, held_out)[logged]
    return lengths


def draw(curves: Curves, metrics: Sequence[str], file: Path) -> None:
    """Draw these metrics, accepted lengths on held-out text, over the steps."""
    from scripts.common.pictures import BLUE, GREY, RED, YELLOW, save, start

    figure, plots = start("", list(metrics), 1, (1 + 4.5 * len(metrics), 4), sharey=True)
    for axes, name in zip(plots, metrics, strict=True):
        for (label, curve), color in zip(curves.items(), (GREY, YELLOW, BLUE, RED), strict=False):
            axes.plot([step for step, _ in curve], [values[name] for _, values in curve], color=color, label=label)
        axes.set_xlabel("steps of training the heads")
    plots[0].set_ylabel("tokens per verification step")
    plots[-1].legend(frameon=False)
    save(figure, file)


if __name__ == "__main__":
    sys.exit(main())
