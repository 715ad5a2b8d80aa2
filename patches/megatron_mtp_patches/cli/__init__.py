"""The command `megatron-mtp-patches`.

Exit codes; `run` ends with that of the script:

  0    each                       All is well.
  1    each                       Megatron, or another package that is needed, is missing or does not fit.
       status                     A patch is refused or not applied, or another library has overwritten it.
       explain                    This patch is refused.
       verify-mtp                 The MTP loss trains anything but MTP heads, or no head, or no step is run.
       doctor -- FLAGS, --batch   The patches leave a defect of severity 3 or more.
       upgrade                    In the newer Megatron the patches leave such a defect that the older one has not.
       doctor --batch             A launch script has one, and nothing shows that its run has the patches: its command
                                  does not run them, its Python file, where found, does not import them, and
                                  MEGATRON_MTP_PATCHES is not set, or has no effect without `enable`.
       audit --fail-on SEVERITY   There is a defect of this severity or more.
       check-export               Something is wrong with the exported model.
       reproduce                  The patches leave a defect that one of them is to remove.
       reproduce --report         This Megatron does not have the defect.
       parity                     A cut differs from one rank, or with --resume a resumed run from the one that went on,
                                  and would not with all patches.
       drift                      A target has an unknown source, or another one than in the release.
  2    each                       Wrong usage. All but audit, export, check-export, reproduce, enable and disable
                                  refuse an unknown id in MEGATRON_MTP_PATCHES.
       doctor -- FLAGS, --batch   Megatron refuses the flags, a flag is misspelt, or a patch that it needs is left out.
       upgrade                    The newer one does not know a flag, one of them refuses the flags, or is no Megatron.
       doctor --batch             A file has no run, or something keeps a setting of the patches from acting.
       export                     This Megatron does not have the defect, or there is no diff of it.
       parity                     Megatron refuses the run made small, or a cut of it, or a file has no such run.
  3    parity                     A cut, or a resumed run, differs with all patches or beyond what they remove.
       upgrade --run              A number of the run made small differs, or it does not train in both.
  125  reproduce                  A package that a program needs is missing, and no other program ends with 1.
       check-export               safetensors or torch is missing.
       parity                     A package that the run imports, or whose layers it has, is missing.
  141  all but run, verify-mtp    The reader of the output has ended, as after `| head -1`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import apply
from ..engine import PatchError, UsageError
from ..megatron_engine import ENGINE

CANNOT_RUN = 125  # an exit code, as that of the file which `reproduce --standalone` writes
TAKE_FLAGS = ("doctor", "parity", "upgrade")  # of a training, after `--`


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["run"], ["verify-mtp"]):
        return carry_out(words)  # what a script does with a broken pipe is its own affair
    try:
        try:
            return carry_out(words)
        finally:
            sys.stdout.flush()  # here, where an error can be answered, not at the end of the process
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as if the signal had ended it; it has not said all, so this is no 0


def carry_out(words: list[str]) -> int:
    """Carry out the command that these words are; its exit code."""
    if Path("megatron", "core").is_dir() and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))  # a checkout, in which `run` and `python -m` also find Megatron
    from .parser import make_parser

    parser = make_parser(__doc__ or "")
    flags = words.index("--") if words and words[0] in TAKE_FLAGS and "--" in words else len(words)
    arguments, unknown = parser.parse_known_args(words[:flags], argparse.Namespace(words=words))
    if unknown:
        hint = "; the flags of a training go after `--`" if arguments.command in TAKE_FLAGS else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        if arguments.needs_patches and not ENGINE.is_active:  # the import leaves the error to the command
            apply()
    except PatchError as error:  # nothing of Megatron is imported yet: the environment names an unknown patch or policy
        return _print_error(error, UsageError.exit_code)
    try:
        return arguments.carry_out(arguments)
    except PatchError as error:
        return _print_error(error, error.exit_code)


def _print_error(error: PatchError, exit_code: int) -> int:
    print(f"megatron-mtp-patches: {error}", file=sys.stderr)
    return exit_code
