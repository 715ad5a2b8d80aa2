"""Reads the flags of a training as Megatron's trainer reads them, without running it."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..catalog import CATALOG
from ..declarations.description import argument_of, flag_of
from ..defects.conditions import MODELOPT_FLAGS, VLM_FLAGS
from ..engine import AddField, AddFlag, UsageError
from ..engine.similar_names import find_similar
from ..megatrons.installed import PACKAGES, describe_mixture
from .findings import RunSettings
from .megatron_refusals import flags_left_out, reason, refuser

OPTIONS = {"--json", "--te", "--world-size"}  # of `doctor`
TORCHRUN_OPTIONS = {"--nproc-per-node", "--nproc_per_node", "--nnodes"}
# What --use-checkpoint-args reads from the checkpoint and some defect depends on.
FROM_CHECKPOINT = (
    "--num-experts",
    "--moe-grouped-gemm",
    "--moe-layer-freq",
    "--disable-bias-linear",
    "--mtp-num-layers",
    "--mtp-use-repeated-layer",
    "--hybrid-layer-pattern",
)


class UnknownFlags(NamedTuple):
    """The flags that Megatron's parser does not know; a script may.

    Attributes:
        names: the flags.
        similar: the flag of Megatron that one of them is almost the same as.
        is_sized: the number of ranks is known without torchrun's options.
    """

    names: list[str]
    similar: dict[str, str]
    is_sized: bool

    def hints(self) -> Iterator[str]:
        """Yield a line for the unknown flags, and one for each flag that resembles a known one."""
        if self.names:
            yield f"unknown to Megatron, ignored: {' '.join(self.names)}"
        is_of_ms_swift = not {"--model", "--mcore_model"}.isdisjoint(self.names)
        if is_of_ms_swift and any("_" in name for name in self.similar):
            yield "these are arguments of ms-swift: write its command into a file and give this to --batch"
            return
        for name, flag in self.similar.items():
            yield f"{name}: did you mean {flag}? Megatron's parser refuses it, unless your script adds it"
        if OPTIONS.intersection(self.names):
            yield f"{', '.join(sorted(OPTIONS))} go before --"
        if TORCHRUN_OPTIONS.intersection(self.names) and not self.is_sized:
            yield "torchrun's options are ignored: give --world-size N before --"


class CommandLine(NamedTuple):
    """A command line as Megatron reads it.

    Attributes:
        sources: the namespaces that have its settings: what validate_args returns, from --yaml-cfg its sections, and
            some flags of scripts.
        unknown: the flags that Megatron does not know.
        world_size: the number of ranks.
        environment: the variables that validate_args may ask for with these flags, and that were set to read them.
    """

    sources: list[object]
    unknown: UnknownFlags
    world_size: int
    environment: dict[str, str]

    def decided_by_checkpoint(self) -> list[str]:
        """The flags whose values the checkpoint replaces and some defect depends on."""
        return list(FROM_CHECKPOINT) if RunSettings(self.sources, None).use_checkpoint_args else []

    def without_effect(self) -> list[str]:
        """The flags of the patches that act on MTP heads only, where these flags give the model none."""
        settings = RunSettings(self.sources, None)
        if settings.mtp_num_layers or settings.use_checkpoint_args:
            return []
        edits = (edit for patch in CATALOG if not patch.package for edit in patch.edits)
        by_argument = {argument_of(edit): edit for edit in edits if isinstance(edit, (AddField, AddFlag))}
        return [
            flag_of(edit)
            for name, edit in by_argument.items()
            if "mtp" in name and getattr(settings, name) not in (None, edit.default)
        ]


class Variable(NamedTuple):
    """A variable of the environment that validate_args may look at.

    Attributes:
        value: one that it accepts.
        accepts: a pattern of the values that are left as they are.
        is_needed: with which settings it may look.
    """

    name: str
    value: str
    accepts: str
    is_needed: Callable[[RunSettings], object]


def _uses_fsdp(run: RunSettings) -> object:
    return run.use_megatron_fsdp or run.use_torch_fsdp2


def _is_split(run: RunSettings) -> bool:
    return max(run.tensor_model_parallel_size or 1, run.context_parallel_size or 1) > 1


ENVIRONMENT = (
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "8", r"(?!1$).*", _uses_fsdp),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "1", lambda run: _is_split(run) and not _uses_fsdp(run)),
    Variable("NCCL_ALGO", "Ring", ".+", lambda run: run.deterministic_mode),
    Variable("NVTE_CPU_OFFLOAD_V1", "1", "1", lambda run: run.fine_grained_activation_offloading),
)


def read(words: list[str], world_size: int | None) -> CommandLine:
    """Read the flags with Megatron's parser and let it set the defaults, as at the start of a training.

    Raises:
        UsageError: Megatron's trainer does not import, its parser or validate_args refuses the flags, or the patch of
            a flag is left out or refused.
    """
    try:
        from megatron.training import arguments as megatron
    except Exception as error:  # whatever a broken library raises
        raise UsageError(
            f"reading flags needs megatron.training, which does not import: "
            f"{describe_mixture() or _describe_failure(error)}"
        ) from error

    with _as_first_rank(words):
        with refusals():
            parser = megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
            unknown = _unknown_flags(parser, words, world_size is not None)
            parsed = megatron.parse_args(ignore_unknown_args=True)
        if left_out := list(flags_left_out(unknown.names)):
            raise UsageError("\n".join(left_out))
        settings = RunSettings(_sections(parsed), None)
        lacking = {
            one.name: one.value
            for one in ENVIRONMENT
            if one.is_needed(settings) and not re.fullmatch(one.accepts, os.environ.get(one.name, ""))
        }
        os.environ |= lacking
        with refusals(unknown.hints()):
            parsed.world_size = ranks = world_size or smallest_world_size(settings)
            if parsed.yaml_cfg is None:
                arguments = megatron.validate_args(parsed, {})
            else:
                from megatron.training.yaml_arguments import validate_yaml

                arguments = validate_yaml(parsed, {})
            sections = _sections(arguments or parsed)
            fitting = smallest_world_size(RunSettings(sections, None))
    if world_size and ranks % fitting:
        raise UsageError(f"{ranks} ranks: the layers of these flags are split over {fitting} ranks")
    return CommandLine([*sections, _flags_of_scripts(unknown)], unknown, ranks, lacking)


def _describe_failure(error: Exception) -> str:
    """Name the module that has failed to import, the error, and the way out."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    module = [name for name in frames if name.partition(".")[0] != "importlib"][-1]
    if isinstance(error, ModuleNotFoundError):
        package = PACKAGES.get(error.name or "", error.name)
        advice = f"pip install {package}; `megatron-mtp-patches doctor` names the packages that it needs"
    else:
        advice = f"install the package of {module} again, or in a version that fits"
    return f"{module} raises {type(error).__name__}: {error} ({advice})"


def smallest_world_size(settings: RunSettings) -> int:
    """The smallest number of ranks that dense layers and experts both divide."""
    tensor, pipeline = settings.tensor_model_parallel_size or 1, settings.pipeline_model_parallel_size or 1
    shards = settings.tensor_parallel_num_weight_shards or tensor  # by both tensor parallelism and GTP
    expert_tensor = settings.expert_tensor_parallel_size or tensor
    expert_shards = settings.expert_tensor_parallel_num_weight_shards or expert_tensor
    dense = shards * pipeline * (settings.context_parallel_size or 1)
    experts = expert_shards * (settings.expert_model_parallel_size or 1)
    return math.lcm(dense, experts * pipeline)


def _unknown_flags(parser: argparse.ArgumentParser, words: list[str], is_sized: bool) -> UnknownFlags:
    names = [word.partition("=")[0] for word in parser.parse_known_args(words)[1] if word.startswith("-")]
    similar = {name: find_similar(name, parser._option_string_actions, cutoff=0.9) for name in names}
    return UnknownFlags(names, {name: flag for name, flag in similar.items() if flag}, is_sized)


def _flags_of_scripts(unknown: UnknownFlags) -> SimpleNamespace:
    """The flags of scripts that some defect depends on."""
    attributes = {name.lstrip("-").replace("-", "_") for name in unknown.names}
    return SimpleNamespace(**{name: True for name in (*VLM_FLAGS, *MODELOPT_FLAGS) if name in attributes})


def _sections(arguments: Any) -> list[object]:
    """The arguments, and the sections that a YAML file groups them in."""
    sections = (value for value in vars(arguments).values() if isinstance(value, SimpleNamespace))
    return [arguments, *sections]


@contextlib.contextmanager
def _as_first_rank(words: list[str]) -> Iterator[None]:
    """Set what Megatron asks the process for: the flags, and its rank."""
    environment, argv = dict(os.environ), sys.argv
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    sys.argv = ["doctor", *words]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= environment
        sys.argv = argv


@contextlib.contextmanager
def refusals(hints: Iterable[str] = ()) -> Iterator[None]:
    """Turn whatever Megatron or a patch raises on flags into a UsageError with its text and `hints` at the cause."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as error:
        raise UsageError(f"Megatron's parser: {printed.getvalue().strip().rpartition('error: ')[2]}") from error
    except Exception as error:  # assertions, and whatever else a wrong value leads to
        if isinstance(error, AttributeError) and isinstance(error.obj, SimpleNamespace):
            why = f"the YAML file names no {error.name}: add it, at its top level or in its section"
        else:
            empty = "; an empty YAML file also does that" if isinstance(error, AttributeError) else ""
            why = f"{refuser(error)} these flags: {reason(error)}{empty}"
        raise UsageError("\n".join([why, *hints])) from error
