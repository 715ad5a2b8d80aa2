"""The command line of each command."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import __version__
from ..catalog import CATALOG
from ..megatrons.known import VERSIONS
from . import commands


def make_parser(description: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-mtp-patches", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(needs_patches=True)
    subparsers = parser.add_subparsers(dest="command", required=True)

    status = subparsers.add_parser(
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
    status.set_defaults(carry_out=commands.status)

    explain = subparsers.add_parser(
        "explain", help="what a patch does and where it stands here, a known defect, or who changes a function"
    )
    explain.add_argument(
        "name",
        metavar="ID_OR_FUNCTION",
        help=f"a function that the patches change, GPTModel._postprocess, a known defect, ML-5047, or a patch: "
        f"{', '.join(patch.id for patch in CATALOG)}",
    )
    explain.set_defaults(carry_out=commands.explain)

    for name, purpose in (
        ("run", "run a training script with the patches; on the CPU with --device cpu"),
        ("verify-mtp", "run its first step to see that the MTP loss trains the MTP heads and nothing else"),
    ):
        run = subparsers.add_parser(name, help=purpose)
        run.add_argument(
            "--device", choices=["cpu", "cuda"], help="cpu: rehearse without a GPU; cuda: fail if there is none"
        )
        run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
        run.add_argument("script", metavar="SCRIPT")
        run.add_argument("rest", metavar="ARGS", nargs=argparse.REMAINDER)  # for the usage; see _run
        run.set_defaults(carry_out=commands.run)

    doctor = subparsers.add_parser(
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
    doctor.set_defaults(carry_out=commands.doctor)

    parity = subparsers.add_parser(
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
    parity.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="of the small run (default: fp32; with --resume bf16)"
    )
    parity.add_argument(
        "--resume",
        action="store_true",
        help="instead, save after the first step, resume on the same ranks and on others, and compare with the run "
        "that went on",
    )
    parity.add_argument("--save", default="", metavar="FILE", help="write a program that shows the first finding")
    parity.add_argument("--json", action="store_true", help="for programs")
    parity.set_defaults(carry_out=commands.parity)

    upgrade = subparsers.add_parser(
        "upgrade",
        usage="%(prog)s [-h] [--world-size N] [--json] [--run [options]] FROM TO -- FLAGS",
        help="what another Megatron changes for a training: known defects, settings, superfluous patches",
    )
    for name, what in (("from_megatron", "FROM"), ("to_megatron", "TO")):
        upgrade.add_argument(
            name,
            metavar=what,
            help="a checkout or a folder of packages, a wheel, a Python that has one, or a release for pip to download",
        )
    upgrade.add_argument("--world-size", type=int, metavar="N", help="of the run (default: the smallest that fits)")
    upgrade.add_argument("--json", action="store_true", help="for programs")
    upgrade.add_argument(
        "--run", action="store_true", help="train the run made small in both, as `parity` does, and compare the numbers"
    )
    upgrade.add_argument(
        "--script", default="", metavar="FILE", help="of the run (default: pretrain_gpt.py beside each Megatron)"
    )
    upgrade.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the small run")
    upgrade.add_argument(
        "--ranks", type=int, choices=range(1, 9), default=2, metavar="N", help="most of a cut, up to 8 (default: 2)"
    )
    upgrade.set_defaults(carry_out=commands.upgrade, needs_patches=False)

    audit = subparsers.add_parser("audit", help="all known defects of a Megatron, read from its sources")
    _add_against(audit)
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
    audit.set_defaults(carry_out=commands.audit, needs_patches=False)

    export = subparsers.add_parser("export", help="small repairs as a patch file for your own Megatron")
    export.add_argument("--diff", action="store_true", required=True, help="print it, for `patch -p1`")
    export.add_argument("ids", nargs="*", metavar="ID", help="of a defect (default: each that has a diff)")
    _add_against(export)
    export.set_defaults(carry_out=commands.export, needs_patches=False)

    check_export = subparsers.add_parser(
        "check-export", help="MTP heads and other tensors that an exported model of Hugging Face lacks or has wrong"
    )
    check_export.add_argument("folder", type=Path, metavar="DIR", help="with config.json and *.safetensors")
    check_export.add_argument("--base", type=Path, metavar="DIR", help="of the model that it was trained from")
    check_export.set_defaults(carry_out=commands.check_export, needs_patches=False)

    reproduce = subparsers.add_parser(
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
    reproduce.set_defaults(carry_out=commands.reproduce, needs_patches=False)

    for name, purpose in (
        ("enable", "apply the patches in every Python of this environment in which MEGATRON_MTP_PATCHES is set"),
        ("disable", "undo enable"),
    ):
        subparsers.add_parser(name, help=purpose).set_defaults(carry_out=commands.zero_touch, needs_patches=False)

    drift = subparsers.add_parser("drift", help="which targets have a source that the patches do not know")
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
    drift.set_defaults(carry_out=commands.drift)
    return parser


def _add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        metavar="PATH",
        help="a Megatron-LM checkout or a folder of packages, PATH:PATH for both (default: the installed Megatron)",
    )
