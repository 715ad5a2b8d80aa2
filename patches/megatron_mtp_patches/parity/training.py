"""One rank of a small training: the script's own loop, with given weights and samples, and a record of its numbers."""

from __future__ import annotations

import argparse
import functools
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from megatron_overrides.model_places import Placement, place

from ..engine import UsageError
from . import weights
from .gradients import Parts, collect_buffers, collect_gradients, collect_weights
from .hidden_states import HiddenStates
from .random_states import digest_random_states
from .samples import Samples
from .small import VOCABULARY, SmallRun

MODELS = (
    "megatron.core.models.gpt.gpt_model:GPTModel",
    "megatron.core.models.hybrid.hybrid_model:HybridModel",
    "megatron.core.models.mamba.mamba_model:MambaModel",
    "mcore_bridge.model.gpt_model:GPTModel",
)
_LINE = re.compile(r"iteration +\d+/ +\d+ \|.*")
_PAIR = re.compile(r"\| *([^|:]+): +([-+\d.naifE]+)")
# Of a line of the log: what no cut has to share.
_OF_THE_MACHINE = re.compile(r"time|throughput|memory|size|number of|per day|TFLOP|tokens/s")


class FrameworkRun(Protocol):
    """A run that a framework trains by its own loop."""

    trainer: str
    """What trains it, as it is printed."""

    not_covered: str
    """What of such runs parity does not compare, as a clause."""

    @property
    def carriers(self) -> tuple[str, ...]:
        """The ids of the patches without which some others do not act in its models."""

    def import_trainer(self) -> None:
        """Import the framework. Raises MissingPackageError where it does not import."""

    def shrink(self, dtype: str) -> SmallRun:
        """Make the run small. Raises UsageError where parity cannot train it."""

    def train(self, job: Job, record: Record, state: Placement) -> None:
        """Train as this rank with the flags of the job, and leave its numbers in `record`."""


class Job(NamedTuple):
    """A training.

    Attributes:
        script: the file that a user starts, as pretrain_gpt.py; or the run of a framework.
        flags: its arguments.
        ranks: how many there are.
        data: the kind of samples.
        draw: which random weights.
        step: how far each weight is moved, as a part of itself.
        patches: which patches are applied, as in MEGATRON_MTP_PATCHES; None for those of this process.
    """

    script: str | FrameworkRun
    flags: tuple[str, ...]
    ranks: int
    data: str = "uneven"
    draw: int = 0
    step: float = 0.0
    patches: str | None = None


class Printed(NamedTuple):
    """A number of the log, and the unit of its last digit."""

    value: float
    unit: float

    @classmethod
    def read(cls, text: str) -> Printed:
        exponent = Decimal(text).as_tuple().exponent
        return cls(float(text), 10.0**exponent if isinstance(exponent, int) else 0.0)


@dataclass
class Record:
    """What one rank has seen.

    Attributes:
        losses: of each step, by name: sums and counts as the trainer reduces them.
        norms: the gradient norm of each step; None where the trainer knows none.
        lines: the numbers of each line of the log, by name.
        gradients: of each step, {name of a weight: [(shape, region, values)]}.
        weights: before each step, likewise; the forward pass has gathered what the step before has updated.
        buffers: after each step, likewise.
        random: before each step, {name of a random generator: digest of its state}.
        hidden: the hidden states of the first step.
        unplaced: the parameters that have no place in a checkpoint.
        arguments: those of Megatron's arguments that are plain values, by name.
    """

    losses: list[dict[str, list[float]]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    lines: list[dict[str, Printed]] = field(default_factory=list)
    gradients: list[Parts] = field(default_factory=list)
    weights: list[Parts] = field(default_factory=list)
    buffers: list[Parts] = field(default_factory=list)
    random: list[dict[str, int]] = field(default_factory=list)
    hidden: HiddenStates = field(default_factory=HiddenStates)
    unplaced: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    def after(self, steps: int) -> Record:
        """The record of the steps after so many."""
        later = {
            name: getattr(self, name)[steps:]
            for name in ("losses", "norms", "lines", "gradients", "weights", "buffers", "random")
        }
        return replace(self, **later, hidden=self.hidden.after(steps))


def train(job: Job) -> Record:
    """Train as this rank."""
    record = Record()
    state = _prepare_models(job, record)
    if isinstance(job.script, str):
        _train_script(job.script, job, record, state)
    else:
        job.script.train(job, record, state)
    return record


def _train_script(script: str, job: Job, record: Record, state: Placement) -> None:
    from megatron.training import training

    argparse.ArgumentParser.error = _refuse  # type: ignore[assignment,method-assign]
    sys.argv = [script, *job.flags]
    _give_samples(job)
    _record_optimizer(training, record, state)
    record_log(training, training, record)
    runpy.run_path(script, run_name="__main__")
    if not record.norms:
        raise UsageError(f"{script} has ended without a step of Megatron's pretrain()")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise UsageError(message)  # its own method prints it where nobody sees it, and exits


def _prepare_models(job: Job, record: Record) -> Placement:
    """Have each model filled and watched as soon as it is built; what is returned gets the places of its state then."""
    state = Placement([], [], record.unplaced)

    def prepare(model: Any) -> None:
        placement = place(model)
        weights.fill(placement.shards, model.config.layernorm_zero_centered_gamma, job.draw, job.step)
        state.shards.extend(placement.shards)
        state.buffers.extend(placement.buffers)
        state.unplaced.extend(placement.unplaced)
        record.hidden.watch(model)
        if "--use-torch-fsdp2" in job.flags:  # Megatron gives what FSDP2 makes of a parameter its attributes
            for param in model.parameters():
                param.orig_param = param

    for name in MODELS:
        module, _, qualified = name.partition(":")
        if module in sys.modules:
            have_instances_prepared(getattr(sys.modules[module], qualified), prepare)
    return state


def have_instances_prepared(model: Any, prepare: Callable[[Any], None]) -> None:
    initialize = model.__init__

    @functools.wraps(initialize)
    def initialize_and_prepare(self: Any, *values: Any, **named: Any) -> None:
        initialize(self, *values, **named)
        if type(self) is model:
            prepare(self)

    model.__init__ = initialize_and_prepare


def _give_samples(job: Job) -> None:
    """Have the trainer draw its batches from our samples."""
    from megatron.core.datasets import utils
    from megatron.training import get_args, training

    utils.compile_helpers = lambda: None  # of the indices of a corpus
    build = training.build_train_valid_test_data_iterators

    def provide(numbers: Any, vp_stage: int | None = None) -> tuple[Samples, None, None]:
        return Samples(numbers[0], get_args(), job.data, VOCABULARY - 1), None, None

    provide.is_distributed = True  # type: ignore[attr-defined]
    training.build_train_valid_test_data_iterators = lambda _: build(provide)


def record_log(calling: Any, printing: Any, record: Record) -> None:
    """Have a trainer's `training_log` leave its numbers in `record`.

    Args:
        calling, printing: the modules in which `training_log` is called and `print_rank_last` is.
    """
    log = calling.training_log

    @functools.wraps(log)
    def log_and_record(losses: dict[str, Any], *values: Any, **named: Any) -> Any:
        record.losses.append(
            {name: torch.as_tensor(value).double().flatten().tolist() for name, value in losses.items()}
        )
        record.norms.append(None if values[6] is None else float(values[6]))  # grad_norm
        return log(losses, *values, **named)

    calling.training_log = log_and_record
    show = printing.print_rank_last

    def show_and_record(text: str) -> None:
        if line := _LINE.search(text):
            pairs = {name.strip(): value for name, value in _PAIR.findall(line[0])}
            record.lines.append(
                {name: Printed.read(value) for name, value in pairs.items() if not _OF_THE_MACHINE.search(name)}
            )
        show(text)

    printing.print_rank_last = show_and_record


def _plain_arguments() -> dict[str, Any]:
    from megatron.training import get_args

    plain = (str, int, float, bool, list, tuple, type(None), torch.dtype)
    return {name: value for name, value in vars(get_args()).items() if isinstance(value, plain)}


def _record_optimizer(training: Any, record: Record, state: Placement) -> None:
    set_up = training.setup_model_and_optimizer

    @functools.wraps(set_up)
    def set_up_and_record(*values: Any, **named: Any) -> Any:
        model, optimizer, *rest = set_up(*values, **named)
        record.arguments = _plain_arguments()
        record_updates(model, optimizer, record, state)
        return model, optimizer, *rest

    training.setup_model_and_optimizer = set_up_and_record


def record_updates(model: list[Any], optimizer: Any, record: Record, state: Placement) -> None:
    """Have each step of an optimizer leave the gradients, weights and buffers of this rank in `record`."""
    step = optimizer.step

    def step_and_record() -> Any:
        record.random.append(digest_random_states())
        record.gradients.append(collect_gradients(model, optimizer, state.shards))
        record.weights.append(collect_weights(optimizer, state.shards))
        result = step()
        record.buffers.append(collect_buffers(state.buffers))
        return result

    optimizer.step = step_and_record
