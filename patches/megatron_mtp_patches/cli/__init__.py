"""The command `megatron-mtp-patches`.

Exit codes; `run` ends with that of the script:

  0    each                       All is well.
  1    each                       Megatron, or another package that is needed, is missing or does not fit.
       status                     A patch is refused or not applied, or another library has overwritten it.
       explain                    This patch is refused.
       verify-mtp                 The MTP loss trains anything but MTP heads, or no head, or no step is run.
       doctor -- FLAGS, --batch   The patches leave a defect of severity 3 or more.
       doctor --batch             A launch script has one, and nothing shows that its run has the patches: its command
                                  does not run them, its Python file, where found, does not import them, and
                                  MEGATRON_MTP_PATCHES is not set, or has no effect without `enable`.
       audit --fail-on SEVERITY   There is a defect of this severity or more.
       reproduce                  The patches leave a defect that one of them is to remove.
       reproduce --report         This Megatron does not have the defect.
       parity                     A cut differs from one rank, and would not with all patches.
       drift                      A target has an unknown source, or another one than in the release.
  2    each                       Wrong usage. All but audit, reproduce, enable and disable refuse an unknown id in
                                  MEGATRON_MTP_PATCHES.
       doctor -- FLAGS, --batch   Megatron refuses the flags, a flag is misspelt, or a patch that it needs is left out.
       doctor --batch             A file has no run, or something keeps a setting of the patches from acting.
       parity                     Megatron refuses the run made small, or a cut of it, or a file has no such run.
  3    parity                     A cut differs from one rank, with all patches or beyond what they remove.
  125  reproduce                  A package that a program needs is missing, and no other program ends with 1.
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

from .. import __version__, apply
from ..catalog import CATALOG
from ..engine import PatchError, UsageError
from ..megatron_engine import ENGINE
from ..megatrons.known import VERSIONS

CANNOT_RUN = 125  # an exit code, as that of the file which `reproduce --standalone` writes


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
    parser = make_parser()
    flags = words.index("--") if words[:1] in (["doctor"], ["parity"]) and "--" in words else len(words)
    arguments, unknown = parser.parse_known_args(words[:flags], argparse.Namespace(words=words))
    if unknown:
        hint = "; the flags of a training go after `--`" if arguments.command in ("doctor", "parity") else ""
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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-mtp-patches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(needs_patches=True)
    commands = parser.add_subparsers(dest="command", required=True)

    status = commands.add_parser(
        "status", help="apply the patches to the installed Megatron and show the state of each"
    )
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument(
        "--retired-by",
        choices=VERSIONS,
        metavar="RELEASE",
        help=f"instead, which patches an upgrade to RELEASE makes superfluous: {', '.join(VERSIONS)}",
    )
    status.set_defaults(carry_out=_status)

    explain = commands.add_parser(
        "explain", help="what a patch does and where it stands here, a known defect, or who changes a function"
    )
    explain.add_argument(
        "name",
        metavar="ID_OR_FUNCTION",
        help=f"a function that the patches change, GPTModel._postprocess, a known defect, ML-5047, or a patch: "
        f"{', '.join(patch.id for patch in CATALOG)}",
    )
    explain.set_defaults(carry_out=_explain)

    for name, purpose in (
        ("run", "run a training script with the patches; on the CPU with --device cpu"),
        ("verify-mtp", "run its first step to see that the MTP loss trains the MTP heads and nothing else"),
    ):
        run = commands.add_parser(name, help=purpose)
        run.add_argument(
            "--device", choices=["cpu", "cuda"], help="cpu: rehearse without a GPU; cuda: fail if there is none"
        )
        run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
        run.add_argument("script", metavar="SCRIPT")
        run.add_argument("rest", metavar="ARGS", nargs=argparse.REMAINDER)  # for the usage; see _run
        run.set_defaults(carry_out=_run)

    doctor = commands.add_parser(
        "doctor",
        usage="%(prog)s [-h] [--world-size N] [--te VERSION] [--json] [-- FLAGS | --batch FILE ...]",
        help="check the environment: versions, and which features missing packages disable; "
        "or, with `-- FLAGS` of Megatron's trainer, which known defects affect them",
    )
    doctor.add_argument("--world-size", type=int, metavar="N", help="of the run (default: the smallest that fits)")
    doctor.add_argument("--te", metavar="VERSION", help="TransformerEngine's (default: the installed one)")
    doctor.add_argument(
        "--batch",
        nargs="+",
        metavar="FILE",
        help="runs in files: a launch script, a recipe of Megatron-LM's tests, the configuration of Megatron-Bridge, "
        "verl or ms-swift, flags as text",
    )
    doctor.add_argument("--json", action="store_true", help="for programs; only with FLAGS or --batch")
    doctor.set_defaults(carry_out=_doctor)

    parity = commands.add_parser(
        "parity",
        usage="%(prog)s [-h] [options] -- FLAGS, or %(prog)s [options] --batch FILE ...",
        help="train a small copy of a run on one rank and on each cut of its layout, and compare all gradients",
    )
    parity.add_argument(
        "--script", metavar="FILE", help="of the run (default: pretrain_gpt.py, here or beside Megatron)"
    )
    parity.add_argument("--batch", nargs="+", metavar="FILE", help="runs in files, as for doctor")
    parity.add_argument(
        "--ranks", type=int, choices=range(2, 9), default=4, metavar="N", help="most of a cut, up to 8 (default: 4)"
    )
    parity.add_argument(
        "--cut", action="append", default=[], metavar="NAME", help="only the cut of this name, as 'TP2 PP2'; repeatable"
    )
    parity.add_argument("--data", choices=["uneven", "whole"], default="uneven", help="which tokens the loss counts")
    parity.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the small run")
    parity.add_argument("--save", default="", metavar="FILE", help="write a program that shows the first finding")
    parity.add_argument("--json", action="store_true", help="for programs")
    parity.set_defaults(carry_out=_parity)

    audit = commands.add_parser("audit", help="all known defects of a Megatron, read from its sources")
    audit.add_argument(
        "--against",
        metavar="PATH",
        help="a Megatron-LM checkout or a folder of packages, PATH:PATH for both (default: the installed Megatron)",
    )
    form = audit.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--sarif", action="store_true", help="for code hosts")
    audit.add_argument(
        "--fail-on",
        type=int,
        choices=range(1, 6),
        metavar="SEVERITY",
        help="end with 1 if there is a defect of this severity or more, 1 to 5",
    )
    audit.set_defaults(carry_out=_audit, needs_patches=False)

    reproduce = commands.add_parser(
        "reproduce", help="show a known defect on this machine's CPU, as Megatron is and with the patches"
    )
    which = reproduce.add_mutually_exclusive_group(required=True)
    which.add_argument("id", nargs="?", metavar="ID", help="of the defect, as `audit` prints it")
    which.add_argument("--all", action="store_true", help="each defect that has a program")
    form = reproduce.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument(
        "--standalone",
        type=Path,
        metavar="FILE",
        help="show nothing, but write the program of ID into this file, which needs only Megatron, to post it upstream",
    )
    form.add_argument("--report", action="store_true", help="print an issue about ID in Markdown, to post it upstream")
    reproduce.set_defaults(carry_out=_reproduce, needs_patches=False)

    for name, purpose in (
        ("enable", "apply the patches in every Python of this environment in which MEGATRON_MTP_PATCHES is set"),
        ("disable", "undo enable"),
    ):
        commands.add_parser(name, help=purpose).set_defaults(carry_out=_zero_touch, needs_patches=False)

    drift = commands.add_parser("drift", help="which targets have a source that the patches do not know")
    drift.add_argument(
        "--against",
        metavar="PATH_OR_VERSION",
        help="a Megatron-LM checkout (PATH:PATH: with a wheel's folder), or a known release to compare with",
    )
    drift.add_argument("--since", metavar="VERSION", help="which targets there differ from this release's")
    drift.add_argument(
        "--accept", metavar="VERSION", help="from now on the sources of the --against folder are known, as this release"
    )
    drift.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TARGET",
        help="with --accept: only this target becomes known under that name; others stay as known; may be repeated",
    )
    drift.set_defaults(carry_out=_drift)
    return parser


# Each command imports what it needs when it is carried out; `run` must not load more than the script would.


def _status(arguments: argparse.Namespace) -> int:
    from .status import show_retired, show_status

    return show_retired(arguments.retired_by) if arguments.retired_by else show_status(as_json=arguments.json)


def _explain(arguments: argparse.Namespace) -> int:
    from ..defects.catalog import known_defects
    from .explain import explain, explain_defect, explain_function

    if patch := next((patch for patch in CATALOG if patch.id == arguments.name), None):
        return explain(patch)
    defect = next((one for one in known_defects() if one.id == arguments.name), None)
    return explain_defect(defect) if defect else explain_function(arguments.name)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        from .run import run_script as run
    else:
        from .verify import verify as run
    # From the words themselves: argparse would take a `--` of the script's for its own.
    rest = arguments.words[arguments.words.index(arguments.script, 1) + 1 :]
    run(arguments.script, rest, arguments.device, arguments.is_module)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.batch:
        if "--" in arguments.words:
            raise UsageError("give --batch or -- FLAGS, not both: a file has the flags of its own run")
        from .doctor_of_files import diagnose_files

        return diagnose_files(arguments.batch, arguments.world_size, arguments.te, arguments.json)
    if "--" not in arguments.words:
        if arguments.world_size or arguments.te or arguments.json:
            raise UsageError("--world-size, --te and --json need the flags of a training: doctor ... -- FLAGS")
        from .environment import examine

        return examine()
    from .doctor import diagnose_flags

    flags = arguments.words[arguments.words.index("--") + 1 :]
    return diagnose_flags(flags, arguments.world_size, arguments.te, as_json=arguments.json)


def _parity(arguments: argparse.Namespace) -> int:
    if bool(arguments.batch) == ("--" in arguments.words):
        raise UsageError("parity needs either the flags of a training, parity ... -- FLAGS, or --batch FILE ...")
    if arguments.batch and arguments.save:
        raise UsageError("--save is for one run: give its flags after --")
    from .parity import Options, compare_cuts, compare_cuts_of_files

    one = arguments
    options = Options(one.script, one.ranks, one.cut, one.data, one.dtype, one.save, one.json)
    if one.batch:
        return compare_cuts_of_files(one.batch, options)
    return compare_cuts(one.words[one.words.index("--") + 1 :], options)


def _audit(arguments: argparse.Namespace) -> int:
    from .audit import audit

    return audit(arguments.against, arguments.json, arguments.sarif, arguments.fail_on)


def _reproduce(arguments: argparse.Namespace) -> int:
    from .reproduce import reproduce, write_standalone

    if arguments.all and (arguments.standalone or arguments.report):
        raise UsageError("--standalone and --report are about one defect: give its ID in place of --all")
    if arguments.standalone:
        return write_standalone(arguments.id, arguments.standalone)
    if arguments.report:
        from .upstream_report import print_report

        return print_report(arguments.id)
    return reproduce(None if arguments.all else arguments.id, arguments.json)


def _zero_touch(arguments: argparse.Namespace) -> int:
    from .zero_touch import disable, enable

    return enable() if arguments.command == "enable" else disable()


def _drift(arguments: argparse.Namespace) -> int:
    from .drift import show_drift

    return show_drift(arguments.against, arguments.since, arguments.accept, arguments.only)
