"""The command `megatron-mtp-patches`.

Exit codes: 0 all is well; 1 a patch is refused, a source has drifted or something needed is missing; 2 wrong usage.
`run` ends with the script's own code; `verify-mtp` with 1 if the MTP loss trains anything but MTP heads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__, _engine, apply
from ..catalog import CATALOG
from ..engine import PatchError, UsageError

NEED_NO_SET = ("enable", "disable")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = make_parser().parse_args(words)
    try:
        if not _engine.active and arguments.command not in NEED_NO_SET:  # the import may have left the telling to us
            apply()
    except PatchError as error:  # nothing of Megatron is imported yet: the environment asks for what there is not
        return _tell(error, UsageError.exit_code)
    try:
        return _carry_out(arguments, words)
    except PatchError as error:
        return _tell(error, error.exit_code)


def _tell(error: PatchError, exit_code: int) -> int:
    print(f"megatron-mtp-patches: {error}", file=sys.stderr)
    return exit_code


def _carry_out(arguments: argparse.Namespace, words: list[str]) -> int:
    # Each command brings what it needs; `run` must not load more than the script would.
    if arguments.command in ("run", "verify-mtp"):
        # From the words themselves: argparse would take a `--` of the script's for its own.
        rest = words[words.index(arguments.script, 1) + 1 :]
        if arguments.command == "run":
            from .run import run_script

            run_script(arguments.script, rest, arguments.device)
        else:
            from .verify import verify

            verify(arguments.script, rest, arguments.device)
        return 0
    if arguments.command == "status":
        from .status import show_status

        return show_status(as_json=arguments.json)
    if arguments.command == "explain":
        from .explain import explain

        return explain(arguments.id)
    if arguments.command == "doctor":
        from .doctor import examine

        return examine()
    if arguments.command == "enable":
        from .enable import enable

        return enable()
    if arguments.command == "disable":
        from .disable import disable

        return disable()
    from .drift import show_drift

    return show_drift(arguments.against, arguments.since)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-mtp-patches", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    status = commands.add_parser(
        "status", help="apply the set to the installed Megatron and say where each patch stands"
    )
    status.add_argument("--json", action="store_true", help="for programs")

    explain = commands.add_parser("explain", help="what one patch does, and where it stands here")
    explain.add_argument(
        "id", metavar="ID", choices=[patch.id for patch in CATALOG], help=", ".join(p.id for p in CATALOG)
    )

    for name, purpose in (
        ("run", "run a training script under the patches, with no GPU if asked"),
        ("verify-mtp", "run its first step to see that the MTP loss trains the MTP heads and nothing else"),
    ):
        run = commands.add_parser(name, help=purpose)
        run.add_argument("--device", choices=["cpu", "cuda"], help="cpu: rehearse with no GPU; cuda: insist on a GPU")
        run.add_argument("script", metavar="SCRIPT")
        run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)

    commands.add_parser("doctor", help="what this environment has, and what each missing part costs")

    commands.add_parser("enable", help="apply the set in every Python of this environment whose variables ask for it")
    commands.add_parser("disable", help="the opposite of enable")

    drift = commands.add_parser("drift", help="which targets have a source that the patches do not know")
    drift.add_argument(
        "--against", metavar="PATH_OR_VERSION", help="a Megatron-LM checkout, or a known release to compare with"
    )
    drift.add_argument("--since", metavar="VERSION", help="which targets there differ from this release's")
    return parser
