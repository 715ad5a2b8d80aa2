"""Train one layout with TransformerEngine's layers: save, resume, verify, and compare with the reference."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.process import environment, run

from . import cases, packed_data

NAMES = ("lm loss", "mtp_1 loss", "mtp_2 loss", "grad norm", "mtp grad norm")
LINE = re.compile(r"iteration +(\d+)/.*?" + "".join(rf" {name}: +(\S+) \|.*?" for name in NAMES))
LOSSES = 3  # the first of NAMES
VERIFIED = re.compile(r"verify-mtp: the MTP loss has reached \d+ parameters of the heads and nothing else")
LIMIT = 600.0  # seconds, for a process that hangs
Numbers = dict[int, list[float]]


class TrainingError(Exception):
    """Carries the last lines that a failed training printed."""


@dataclass
class Result:
    """The result of one layout.

    Attributes:
        losses: the loss of the main model at each iteration with TransformerEngine's layers.
        reference: the same for the training that must have the same losses; empty if there is none.
        difference: the largest difference of any loss, without losses of heads if samples are packed; None without a
            reference.
        resumes: an interrupted training prints the same numbers, to the last digit.
        verified: verify-mtp finds that the MTP loss reaches the heads and nothing else.
        left_out: why this Megatron cannot train the layout, or (if there are losses) why it cannot resume it.
        error: why a training ended early.
    """

    ranks: int
    losses: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    difference: float | None = None
    resumes: bool = False
    verified: bool = False
    left_out: str = ""
    error: str = ""


def rehearse(checkout: Path, layout: cases.Layout, folder: Path) -> dict[str, Any]:
    """Train a layout in each way; nothing raised, what failed is the result's error."""
    result = Result(layout.ranks, left_out=cases.why_not(checkout, layout))
    if result.left_out:
        return asdict(result)
    try:
        data = packed_data.flags(folder) if layout.packed else cases.MOCK_DATA
        whole = [*cases.MODEL, *data, *layout.flags.split(), *layout.more.split(), *cases.TRANSFORMER_ENGINE]
        straight = _train(
            checkout, layout.ranks, [*whole, "--save", str(folder), "--save-interval", str(cases.SAVED_AT)]
        )
        result.losses = [numbers[0] for numbers in straight.values()]
        result.left_out = cases.why_no_resume(checkout, layout)
        result.resumes = not result.left_out and _resumes(checkout, layout.ranks, whole, folder, straight)
        if layout.reference:
            reference = _train_reference(checkout, layout, data)
            result.reference = [numbers[0] for numbers in reference.values()]
            # Megatron logs the mean of the ranks' MTP losses, and 0 is that of a rank that has no counted token
            compared = range(1 if layout.packed else LOSSES)
            pairs = [(straight[i][place], reference[i][place]) for i in reference for place in compared]
            result.difference = max(abs(one - other) for one, other in pairs)
        result.verified = bool(VERIFIED.search(_run(checkout, layout.ranks, "verify-mtp", whole)))
    except ModuleNotFoundError as error:
        result.error = f"{error}: pip install datasets 'transformers<5'"
    except TrainingError as error:
        result.error = str(error)
    return asdict(result)


def _train_reference(checkout: Path, layout: cases.Layout, data: list[str]) -> Numbers:
    if layout.reference == "1 rank":
        return _train(checkout, 1, [*cases.MODEL, *data, *cases.TRANSFORMER_ENGINE])
    return _train(checkout, layout.ranks, [*cases.MODEL, *data, *layout.flags.split(), *cases.LOCAL])


def _resumes(checkout: Path, ranks: int, words: list[str], folder: Path, straight: Numbers) -> bool:
    (folder / "latest_checkpointed_iteration.txt").write_text(str(cases.SAVED_AT))
    resumed = _train(checkout, ranks, [*words, "--load", str(folder)])
    # Megatron logs the first iteration of a process without resetting its sums, so the second line after a resume
    # shows the mean losses of two iterations. Its other numbers, and all other lines, belong to one iteration.
    second = cases.SAVED_AT + 2
    return all(
        numbers[LOSSES * (i == second) :] == straight[i][LOSSES * (i == second) :] for i, numbers in resumed.items()
    )


def _train(checkout: Path, ranks: int, words: list[str]) -> Numbers:
    output = _run(checkout, ranks, "run", words)
    printed = {int(i): [float(number) for number in numbers] for i, *numbers in LINE.findall(output)}
    first = cases.SAVED_AT + 1 if "--load" in words else 1
    if sorted(printed) != list(range(first, cases.ITERATIONS + 1)):
        raise TrainingError(f"iterations {sorted(printed)} have printed all numbers:\n{output[-2000:]}")
    if not all(math.isfinite(number) for numbers in printed.values() for number in numbers):
        raise TrainingError(f"a loss or a norm is not finite:\n{output[-2000:]}")
    return printed


def _run(checkout: Path, ranks: int, command: str, words: list[str]) -> str:
    """Run a command on the ranks and return their output."""
    program = ["-m", "megatron_mtp_patches", command, "--device", "cpu", str(checkout / "pretrain_gpt.py"), *words]
    variables = environment(CUDA_DEVICE_MAX_CONNECTIONS="1")
    result = run([*study.launcher(sys.executable, ranks), *program], variables, timeout=LIMIT)
    if result.code is None:
        raise TrainingError(f"{command} was killed after {LIMIT:.0f} s:\n{result.tail}")
    if result.code:
        raise TrainingError(f"{command} ended with {result.code}:\n{result.tail}")
    return result.output
