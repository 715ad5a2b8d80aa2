"""The command line and the progress that both parts of the demo share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from scripts.common.arguments import make_parser


def start(program: str, description: str | None) -> tuple[Path, Callable[[str], None]]:
    """Read --output and create its folder; return that, and a function that announces a stage and the time so far."""
    parser = make_parser(program, description)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for logs, flags and plots")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    def announce(stage: str) -> None:
        print(f"\n=== [{time.perf_counter() - started:.0f} s of this part] {stage}", flush=True)

    return output, announce
