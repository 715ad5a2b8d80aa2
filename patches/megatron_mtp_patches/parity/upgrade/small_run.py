"""Trains a run made small in one Megatron, on one rank and on each cut of its layout, as `parity` does.

Weights depend on their names and places alone, samples on their index, so that two Megatrons train the same.
"""

from __future__ import annotations

import ast
import hashlib
import io
import sys
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...doctor.findings import diagnose_sources
from ...doctor.flags import read
from ...engine import UsageError
from ...engine.source import ask, find_definition
from ..cuts import ONE_RANK, Cut, list_cuts, reference_flags
from ..flags import join
from ..processes import Failed, prepare, run, run_with
from ..samples import UNEVEN
from ..scripts import find_script
from ..small import shrink
from ..study import Study
from ..trainer import silence
from ..training import Job, Record, train
from ..verdict import Tolerance
from .trees import Tree

_PACKAGE = "megatron."


class SmallRunOptions(NamedTuple):
    """How a run is made small.

    Attributes:
        script: the file that a user starts; '' for the one beside Megatron.
        dtype: "fp32" or "bf16".
        ranks: the most of a cut; 1 for one rank alone.
        flags: of the run.
        draw: which random weights; None for the first ones of which a small change moves the gradients little.
    """

    script: str
    dtype: str
    ranks: int
    flags: tuple[str, ...]
    draw: int | None = None


class SmallRunNumbers(NamedTuple):
    """What the trainings of a small run have left.

    Attributes:
        records: {name of a cut: those of its ranks}; that of one rank is called ONE_RANK.
        refusals: {name of a cut: why it does not train}.
        functions: {function of Megatron that ran on one rank: digest of its source}.
        defects: {name of a cut: {id of each known defect that affects it and that no patch removes: what it does}}.
        draw: which random weights.
        tolerance: how far numbers may deviate from those of one rank; None where the draw was given.
    """

    records: dict[str, list[Record]]
    refusals: dict[str, str]
    functions: dict[str, str]
    defects: dict[str, dict[str, str]]
    draw: int
    tolerance: Tolerance | None


def train_in(tree: Tree, options: SmallRunOptions) -> SmallRunNumbers:
    """Train the run made small in this Megatron.

    Raises:
        UsageError: there is no script, or the run made small does not train on one rank.
        PatchError: the script or Megatron's trainer does not import.
    """
    answer = io.BytesIO(tree.call(f"{__name__}:train_here", tuple(options)))
    return SmallRunNumbers(*torch.load(answer, weights_only=False))


def train_here(values: tuple[Any, ...]) -> bytes:
    """Train a run with these values of `SmallRunOptions` in the Megatron that this process imports."""
    numbers = _train(SmallRunOptions(*values))
    buffer = io.BytesIO()
    torch.save(tuple(numbers), buffer)  # in a pickle alone a tensor would name a function of Megatron that loads it
    return buffer.getvalue()


def _train(options: SmallRunOptions) -> SmallRunNumbers:
    script = find_script("", list(options.flags), options.script or None)
    prepare(script)
    small = shrink(list(options.flags), options.dtype)
    draw, tolerance = options.draw, None
    if draw is None:
        study = Study(script, small, UNEVEN)
        draw, tolerance = study.trainings.draw, study.reference.tolerance
    reference = Cut(ONE_RANK, 1, reference_flags(small))
    one_rank = run_with(Job(script, join(reference.flags), 1, UNEVEN, draw), _trace)
    if isinstance(one_rank, Failed):
        raise UsageError(f"the run made small does not train on one rank: {one_rank.error}")
    ((record, ran),) = one_rank
    records, refusals = {ONE_RANK: [record]}, {}
    cuts = list(list_cuts(small, options.ranks)) if options.ranks > 1 else []
    for cut in cuts:
        trained = run(Job(script, join(cut.flags), cut.ranks, UNEVEN, draw))
        if isinstance(trained, Failed):
            refusals[cut.name] = trained.error
        else:
            records[cut.name] = trained
    for record in (record for ranks in records.values() for record in ranks):
        record.arguments.clear()  # which have enumerations of this Megatron
    defects = {cut.name: _find_defects(cut) for cut in (reference, *cuts)}
    return SmallRunNumbers(records, refusals, _digest(ran), defects, draw, tolerance)


def _find_defects(cut: Cut) -> dict[str, str]:
    try:
        with silence():
            sources = read(list(join(cut.flags)), cut.ranks).sources
    except UsageError:
        return {}
    masks = SimpleNamespace(eod_mask_loss=True)  # uneven samples leave tokens out of the loss as well
    return {one.id: one.text for one in diagnose_sources([masks, *sources], None) if not one.is_removed}


def _trace(job: Job) -> tuple[Record, set[tuple[str, str]]]:
    """Train as this rank; also return the (module, name) of each function of Megatron that ran."""
    ran: set[tuple[str, str]] = set()

    def remember(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(_PACKAGE):
            ran.add((module, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)))

    sys.setprofile(remember)
    try:
        return train(job), ran
    finally:
        sys.setprofile(None)


def _digest(ran: set[tuple[str, str]]) -> dict[str, str]:
    """The source of each function that can be looked up by its name, with what is defined inside it."""
    names = {(module, name.partition(".<locals>")[0]) for module, name in ran}
    digests = {f"{module}:{name}": ask(_digest_definition, module, name) for module, name in sorted(names)}
    return {name: digest for name, digest in digests.items() if digest}


def _digest_definition(tree: ast.Module, name: str) -> str | None:
    node = find_definition(tree, name)
    return None if node is None else hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
