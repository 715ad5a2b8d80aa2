"""Advice, for `doctor` and `run`, on a command line that Megatron or a patch refuses.

The patches refuse their own flags beside others in `megatron_overrides/TOPIC/checks.py`, which `Setting.check` names.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator

from ..declarations.description import setting_texts
from ..engine.similar_names import find_similar
from ..engine.state import State
from ..megatron_engine import ENGINE

_ASKS_FOR = re.compile(r"assert args\.(\w+) is not None")
_REFUSALS = (AssertionError, ValueError, RuntimeError)  # what Megatron raises to refuse, in its own words


def reason(error: BaseException) -> str:
    """The error's own words; for an assertion without words, the flag that it asks for, or else its line.

    What was not raised to refuse, such as a division by zero, is named with its kind and its line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    in_megatron = [frame for frame in frames if "/megatron/" in frame.filename.replace("\\", "/")]
    line = (in_megatron or frames)[-1].line or ""
    if not isinstance(error, _REFUSALS):
        return f"{type(error).__name__}: {error}, at `{line}`"
    missing = _ASKS_FOR.match(line)
    return str(error) or (f"add --{missing[1].replace('_', '-')}" if missing else line)


def refuser(error: BaseException) -> str:
    """ "Megatron refuses", or "A patch refuses" where code of the patches has raised the error."""
    files = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)]
    owner = next((file for file in reversed(files) if "/megatron/" in file or "/megatron_overrides/" in file), "")
    return "A patch refuses" if "/megatron_overrides/" in owner else "Megatron refuses"


def is_silent_refusal(error: AssertionError) -> bool:
    """True if Megatron's check of the flags has raised it without a word."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return not str(error) and file.replace("\\", "/").endswith("megatron/training/arguments.py")


def flags_left_out(words: Iterable[str]) -> Iterator[str]:
    """A sentence for each flag among `words` whose patch was left out or refused: Megatron does not know it then."""
    flags = _names(words)
    for patch in ENGINE.catalog:
        report = ENGINE.report(patch)
        if report.state in (State.DISABLED, State.REFUSED):
            for flag in sorted(flags.intersection(one.name.split()[0] for one in setting_texts(patch))):
                why = report.reason if report.state is State.DISABLED else "refused here: see `status`"
                yield f"{flag} comes with the patch {patch.id}, which is {why}"


def flags_misspelt(words: Iterable[str]) -> Iterator[str]:
    """A question for each flag among `words` that is almost one of the patches: argparse does not say which.

    ms-swift also knows them by the names of their settings.
    """
    flags_of_patches = {setting.name.split()[0] for patch in ENGINE.catalog for setting in setting_texts(patch)}
    taken = set(flags_of_patches)
    if "swift.megatron" in sys.modules:
        taken |= {f"--{flag[2:].replace('-', '_')}" for flag in flags_of_patches}
    for flag in sorted(_names(words) - taken):
        if similar := find_similar(flag.replace("_", "-"), flags_of_patches, cutoff=0.9):
            yield f"{flag}: did you mean {similar}?"


def _names(words: Iterable[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}
