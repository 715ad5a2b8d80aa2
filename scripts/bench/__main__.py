"""Measure what the patches cost and what they save. Needs torch and megatron-core in each Python that is measured."""

from __future__ import annotations

import argparse

from scripts.bench import acceptance, losses, startup, step
from scripts.common.arguments import make_parser

COMMANDS = {
    "step": step,
    "import": startup,
    "acceptance": acceptance,
    "losses": losses,
}


def main() -> None:
    parser = make_parser("scripts.bench", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        doc = module.__doc__ or ""
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=doc.partition("\n")[0], description=doc, formatter_class=raw)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
