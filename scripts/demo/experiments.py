"""Train a small GPT several times, and compare as a table and as a plot. `runs.warm()` must have been called.

losses: one main model, frozen; MTP heads trained over it by cross entropy and by e2e_tv; how many tokens a verification
step of speculative decoding yields with either.

skipping: one training to a checkpoint, which continues from there without and with --grad-norm-skip-threshold. Both
continuations meet the same accident: bursts of batches that arrive still compressed (dataset.py).

What is compared differs by the named flags only: command line, seed and order of the data are otherwise the same.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.common.markdown import Table
from scripts.common.megatron_trainer import PLAIN_MODULES

from . import plots
from .runs import Curves, train

CLIP = 1.0
SPLIT = (98, 2, 0)  # percent of the documents that are for training, validation and test
FLAGS = f"""
    {PLAIN_MODULES}
    --num-layers 3 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 96
    --max-position-embeddings 96 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 8 --global-batch-size 8 --seed 1234 --clip-grad {CLIP:g} --lr 2e-3 --min-lr 5e-4
    --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95
    --split {",".join(map(str, SPLIT))} --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 8
    --log-interval 20 --tensorboard-log-interval 1 --eval-interval 100000 --eval-iters 20 --save-interval 100000
    --ckpt-format torch --untie-embeddings-and-output-weights
""".split()

THRESHOLD = 10.0  # gradient norms: about 1 on text (9 in the very first steps), above 20 on compressed bytes

LOSSES = ("cross_entropy", "e2e_tv")
DEPTHS = 3
# Decoding: this many texts of so many bytes each, the first ones given.
TEXTS, LENGTH, PROMPT = 24, 64, 16


class Accident(NamedTuple):
    """Of the experiment `skipping`."""

    fork: int  # the iteration of the checkpoint
    last: int  # the iteration that ends both continuations
    bursts: tuple[range, ...]  # iterations whose batches are compressed
    flags: list[str]  # of all its runs

    @property
    def corrupt(self) -> frozenset[int]:
        return frozenset(iteration for burst in self.bursts for iteration in burst)


HEADS_FLAGS = "--train-iters 240 --lr-warmup-iters 10 --eval-interval 40 --eval-iters 8".split()
ACCIDENT = Accident(240, 320, (range(244, 252), range(284, 292)), ["--train-iters", "320"])


def train_to_fork(data: Path, output: Path, accident: Accident) -> Curves:
    """Train to the iteration `accident.fork`, and leave a checkpoint there."""
    shutil.rmtree(_checkpoint(output), ignore_errors=True)
    saved = ["--save", str(_checkpoint(output)), "--exit-interval", str(accident.fork)]
    return train(output, {"main_model": _flags(data, *accident.flags, *saved)})[0]


def losses(data: Path, output: Path, flags: list[str]) -> list[Curves]:
    """Train the heads by each of LOSSES over the frozen main model of the checkpoint, and decode; draw the plot."""
    heads = f"--mtp-num-layers {DEPTHS} --freeze-base-model-for-mtp --mtp-init random --mtp-loss-scaling-factor 1"
    words = [*flags, *heads.split(), "--pretrained-checkpoint", str(_checkpoint(output)), "--mtp-loss-type"]
    runs = train(output, {loss: _flags(data, *words, loss) for loss in LOSSES}, partial(decode, data))
    plots.draw_losses(dict(zip(LOSSES, runs, strict=True)), output / plots.LOSSES)
    return runs


def decode(data: Path, model: Any) -> dict[str, float]:
    """Return the tokens that a verification step yields in a speculative decoder, on prompts that were held out."""
    import torch

    from scripts.acceptance import decoder

    from .dataset import held_out

    device = next(model.parameters()).device
    text = held_out(data, SPLIT[0]).to(device)
    with torch.device(device):
        begins = torch.linspace(0, len(text) - PROMPT, TEXTS).long().tolist()
        prompts = torch.stack([text[begin : begin + PROMPT] for begin in begins])
        samplers = {"sampled": torch.Generator(device).manual_seed(5), "greedy": None}
        return {
            name: decoder.decode(model, prompts, LENGTH, sampler).tokens_per_step for name, sampler in samplers.items()
        }


def compare_losses(runs: list[Curves]) -> Table:
    rows = [
        ["decoded, sampling", *(f"{run.measured['sampled']:.2f}" for run in runs)],
        ["decoded, greedily", *(f"{run.measured['greedy']:.2f}" for run in runs)],
        ["sampling, logged on held-out text", *(f"{list(run.accepted_length.values())[-1]:.2f}" for run in runs)],
    ]
    note = (
        "The model writes the decoded text itself. Greedy decoding repeats itself, and\n"
        "that is easy to draft: its numbers are above the greedy ones on held-out text."
    )
    return Table("tokens per verification step", ["--mtp-loss-type", *LOSSES], rows, right=(1, 2), note=note)


def judge_losses(runs: list[Curves]) -> str:
    """Say what the measured difference is, whichever loss it speaks for."""
    before, after = (run.measured["sampled"] for run in runs)
    if after <= before:
        return f"In this run {LOSSES[1]} was not better than {LOSSES[0]}: {after:.2f} against {before:.2f} tokens."
    more, percent = after - before, 100 * (after / before - 1)
    return f"{LOSSES[1]}: {more:.2f} more tokens in each verification step, {percent:.0f} %."


def skipping(data: Path, output: Path, accident: Accident, shared: Curves) -> Table:
    """Continue from the checkpoint of `train_to_fork`, draw the plot in `output`, and compare."""
    flags = _flags(data, *accident.flags, "--load", str(_checkpoint(output)))
    flags += ["--corrupt-iterations", *map(str, sorted(accident.corrupt))]
    threshold = ["--grad-norm-skip-threshold", str(THRESHOLD)]
    before, after = train(output, {"before": flags, "after": [*flags, *threshold]})
    plots.draw_skipping(shared, before, after, accident.bursts, THRESHOLD, output / plots.SKIPPING)
    return compare_skipping(accident, before, after)


def compare_skipping(accident: Accident, *runs: Curves) -> Table:
    def on_text(name: str) -> list[list[float]]:
        return [list(plots.without(getattr(run, name), accident.corrupt).values()) for run in runs]

    losses = on_text("loss")
    rows = [
        ["validation loss at the end", *(f"{run.validation_loss:.3f}" for run in runs)],
        ["training loss on text, mean", *(f"{fmean(values):.3f}" for values in losses)],
        ["training loss on text, worst", *(f"{max(values):.3f}" for values in losses)],
        ["largest gradient norm", *(f"{max(run.grad_norm.values()):.1f}" for run in runs)],
        ["largest gradient norm on text", *(f"{max(norms):.1f}" for norms in on_text("grad_norm"))],
        ["updates skipped", *(str(run.updates_skipped) for run in runs)],
    ]
    title = f"iterations {accident.fork + 1} to {accident.last}, losses in bits per byte"
    return Table(title, ["", "before\nno threshold", f"after\nskip over {THRESHOLD:g}"], rows, right=(1, 2))


def _flags(data: Path, *more: str) -> list[str]:
    return [*FLAGS, "--data-path", str(data), *more]


def _checkpoint(output: Path) -> Path:
    return output / "checkpoint"
