"""What only a GPU shows: two commands of three and six minutes, for one GPU and no network.

    python -m scripts.gpu pack DIR                  with a network: wheels and trees of Megatron, for that machine
    python -m scripts.gpu run --first DIR OUT       there: does it work, and a training
    python -m scripts.gpu run --rest DIR OUT        there: trainings, upstream's tests, times, reproductions
    python -m scripts.gpu run --all DIR OUT         there: all tests on CUDA, as long as they take
    python -m scripts.gpu take OUT [OUT ...]        here: the tables in ci/gpu, and what the pages say of them

The machine needs Python 3.12 with torch and what docs/gpu.md lists. Stages run one after the other, each with its own
limit, and OUT has the results after each one. `run` ends with 1 if a stage has failed or was left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.common.arguments import make_parser, positive

from . import packing, pages, running
from .machine import MachineError
from .stages import COMMANDS


def main() -> int:
    parser = make_parser("scripts.gpu", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    pack = commands.add_parser("pack", help="download and pack what the machine lacks")
    pack.add_argument("folder", type=Path, metavar="DIR", help="below the checkout, where git ignores it: .gpu/pack")
    pack.add_argument(
        "--megatron", required=True, metavar="CLONE", help="a git repository of Megatron-LM, or the URL of one"
    )
    pack.set_defaults(run=lambda options: packing.pack(options.folder, options.megatron))

    run = commands.add_parser("run", help="run stages on this machine")
    which = run.add_mutually_exclusive_group(required=True)
    for name, command in COMMANDS.items():
        which.add_argument(f"--{name}", dest="command", action="store_const", const=name, help=command.about)
    run.add_argument("folder", type=Path, metavar="DIR", help="what `pack` has written")
    run.add_argument("out", type=Path, metavar="OUT", help="the folder of the results")
    run.add_argument("--seconds", type=positive, help="what is not begun by then is left out (default: each command's)")
    run.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: a rehearsal at small sizes")
    run.set_defaults(run=running.run_command)

    take = commands.add_parser("take", help="make the tables of ci/gpu from results")
    take.add_argument(
        "out", type=Path, nargs="+", metavar="OUT", help="a folder that `run` has written; later ones win"
    )
    take.set_defaults(run=lambda options: pages.take(options.out))
    options: argparse.Namespace = parser.parse_args()
    try:
        return options.run(options) or 0
    except MachineError as error:
        sys.exit(f"python -m scripts.gpu: {error}")


if __name__ == "__main__":
    sys.exit(main())
