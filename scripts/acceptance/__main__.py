"""Train MTP heads from one frozen main model, and compare accepted lengths: by each loss, and from each --mtp-init.

    python -m scripts.acceptance [losses] [starts] [--out DIR]      without a word, both

Trains a small GPT on the bytes of the standard library (CPU, one process, 35 minutes), then its heads: by each loss for
the same steps, with three seeds (`losses`), by e2e_tv from both values of --mtp-init (`starts`). Draws the accepted
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

PROMPT, SAMPLES = 16, 12
SEEDS, LOSS_STEPS = (1, 2, 3), 200
# The log is compared with a decoder that begins at every position, with the first seed and on so many of the samples.
COMPARED = 2
LOSSES = {
    "cross_entropy": {},
    "cross_entropy, dpace": {"mtp_position_weights": "dpace"},
    **{loss_type: {"mtp_loss_type": loss_type} for loss_type in ("kl", "tv", "lk", "e2e_tv")},
}
GREEDY, SAMPLED = "mtp greedy acceptance length", "mtp acceptance length"
Curve = list[tuple[int, dict[str, float]]]  # the metrics after so many steps


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
    runs: dict[str, list[dict[str, Any]]] = {}
    for loss, settings in LOSSES.items():
        runs[loss] = []
        for seed in SEEDS:
            console.print(f"training the heads: {loss}, seed {seed}")
            model, curve = training.train_heads(*trained, settings, seed=seed, count=LOSS_STEPS)
            lengths = decode(model, trained.held_out, COMPARED if seed == SEEDS[0] else 0)
            runs[loss].append({"curve": curve, **lengths})
    made_by = f"Made by `python -m scripts.acceptance` with {study.made_with()} on a CPU."
    compared = table.losses(
        runs,
        f"Tokens per verification step of a speculative decoder with {training.DEPTHS} heads, after {LOSS_STEPS} steps "
        f"of training the heads by each loss from one frozen main model: the mean over {len(SEEDS)} seeds of random "
        f"heads and of batches, the lowest and the highest. Decoded: {SAMPLES} texts of {training.LENGTH} bytes; held "
        f"out: what the log says of held-out text. {made_by}",
    )
    checked = table.logged(
        runs,
        f"The same of {COMPARED} of the decoded texts, with the first seed. From every position: drafts begin after "
        f"each token of the decoded text; logged: what the log says of that text. {made_by}",
    )
    for each in (compared, checked):
        each.show()
    study.write(tables / "acceptance" / "cpu", runs, compared.title, [compared, checked])
    curves = {loss: [run["curve"] for run in seeds] for loss, seeds in runs.items()}
    draw(curves, (SAMPLED, GREEDY), pictures / "mtp_acceptance_length.png")


def compare_starts(trained: training.Trained, console: Console, tables: Path, pictures: Path) -> None:
    curves: dict[str, Curve] = {}
    for start in ("random", "last-layer"):
        console.print(f"training the heads: --mtp-init {start}")
        _, curves[start] = training.train_heads(*trained, LOSSES["e2e_tv"], start)
    lengths = {start: [(step, metrics[SAMPLED]) for step, metrics in curve] for start, curve in curves.items()}
    note = (
        f"The accepted length ({SAMPLED}) of {training.DEPTHS} heads on held-out text, over the steps of training them "
        f"by e2e_tv. Made by `python -m scripts.acceptance starts` with {study.made_with()} on a CPU."
    )
    compared = table.starts(lengths, note)
    compared.show()
    study.write(tables / "starts" / "cpu", lengths, compared.title, [compared])
    draw({f"--mtp-init {start}": [curve] for start, curve in curves.items()}, (SAMPLED,), pictures / "mtp_starts.png")


STUDIES = {"losses": compare_losses, "starts": compare_starts}


def decode(model: Any, held_out: Any, compared: int) -> dict[str, float]:
    """Return tokens per verification step: decoded, and as the log says.

    Args:
        compared: on how many of the decoded texts the log is compared with a decoder that begins at every position.
    """
    import torch

    from scripts.acceptance import decoder

    begins = range(0, SAMPLES * 500, 500)
    prompts = torch.stack([held_out[begin : begin + PROMPT] for begin in begins])
    lengths = {}
    samplers = {"greedy": (GREEDY, None), "sampled": (SAMPLED, torch.Generator().manual_seed(5))}
    for name, (logged, sampler) in samplers.items():
        text, lengths[f"{name}, decoded"] = decoder.decode(model, prompts, training.LENGTH, sampler)
        lengths[f"{name}, held out"] = training.measure(model, held_out)[logged]
        if compared:
            text = text[:compared]
            counted = decoder.accepted_from_every_position(model, text, PROMPT, sampler)
            lengths[f"{name}, from every position"] = counted
            lengths[f"{name}, logged"] = training.measure_text(model, text, PROMPT)[logged]
    return lengths


def draw(curves: dict[str, list[Curve]], metrics: Sequence[str], file: Path) -> None:
    """Draw these metrics, accepted lengths on held-out text, over the steps: their means, from lowest to highest."""
    from scripts.common.pictures import BLUE, DARK, GREEN, GREY, RED, YELLOW, save, start

    figure, plots = start("", list(metrics), 1, (1 + 4.5 * len(metrics), 4), sharey=True)
    for axes, name in zip(plots, metrics, strict=True):
        for (label, seeds), color in zip(curves.items(), (GREY, DARK, YELLOW, BLUE, GREEN, RED), strict=False):
            steps = [step for step, _ in seeds[0]]
            columns = list(zip(*([values[name] for _, values in curve] for curve in seeds), strict=True))
            axes.plot(steps, [sum(column) / len(column) for column in columns], color=color, label=label)
            axes.fill_between(steps, [*map(min, columns)], [*map(max, columns)], color=color, alpha=0.2, linewidth=0)
        axes.set_xlabel("steps of training the heads")
    plots[0].set_ylabel("tokens per verification step")
    plots[-1].legend(frameon=False)
    save(figure, file)


if __name__ == "__main__":
    sys.exit(main())
