"""Runs `parity` on drawn configurations, or on each feature alone, in one process of a release.

Each configuration is a line of the output as soon as it is done. The exit code is 1 if a cut has a finding that no
known defect explains.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from .drawing import Configuration, Drawing
from .features import read_slots, unknown_features


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz", description=__doc__)
    parser.add_argument("--script", required=True, help="pretrain_gpt.py of a checkout of this release")
    parser.add_argument("--seed", type=int, default=0, help="of the first configuration; the others follow")
    parser.add_argument("--features", nargs="*", metavar="FEATURE", help="each feature alone, or those that are named")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--count", type=int, help="of configurations (default: 20)")
    much.add_argument("--minutes", type=float, help="until then another configuration starts")
    parser.add_argument("--output", type=Path, help="append a line of JSON for each configuration")
    options = parser.parse_args(words)
    os.environ["MEGATRON_MTP_PATCHES_DEFECTS"] = "off"

    from megatron_mtp_patches.parity.processes import prepare

    prepare(options.script)

    from megatron.training.arguments import add_megatron_arguments

    slots = read_slots()
    unknown = unknown_features(slots, add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    if unknown:
        print(f"this Megatron has no flags for: {', '.join(sorted(unknown))}")
    drawing = Drawing(slots, unknown)
    if options.features is None:
        configurations = map(drawing.draw, itertools.count(options.seed))
    else:
        chosen = options.features
        configurations = (one for one in drawing.single_features() if not chosen or one.name in chosen)
    configurations = _limit(configurations, options)
    with options.output.open("a", encoding="utf-8") if options.output else contextlib.nullcontext() as file:
        answers = list(_study(options.script, configurations, file))
    return summarize(answers)


def _limit(configurations: Iterable[Configuration], options: argparse.Namespace) -> Iterator[Configuration]:
    count = options.count if options.count or options.minutes or options.features is not None else 20
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for configuration in itertools.islice(configurations, count):
        if time.monotonic() > until:
            return
        yield configuration


def _study(script: str, configurations: Iterable[Configuration], file: TextIO | None) -> Iterator[dict[str, Any]]:
    from .studying import study

    for configuration in configurations:
        answer = study(script, configuration)
        if file is not None:
            print(json.dumps(answer), file=file, flush=True)
        outcomes = {cut["name"]: cut["outcome"] for cut in answer["cuts"]}
        print(f"{answer['name']}: {answer['refused'] or outcomes} ({answer['seconds']} s)", flush=True)
        yield answer


def summarize(answers: list[dict[str, Any]]) -> int:
    """Print what came of all configurations; return the exit code."""
    cuts = [(answer, cut) for answer in answers for cut in answer["cuts"]]
    counts = collections.Counter(cut["outcome"] for _, cut in cuts)
    refused = sum(bool(answer["refused"]) for answer in answers)
    print(f"{len(answers)} configurations, {refused} refused; {len(cuts)} cuts: {dict(counts)}")
    for answer, cut in cuts:
        if cut["outcome"] == "unexplained":
            kind, name, step, size = cut["findings"][0]
            print(f"{answer['name']}, {cut['name']}: {kind} {name}, step {step}: off by {size:.2g} of it")
            print(f"    {answer['words']} (data {answer['data']}, dtype {answer['dtype']})")
    return int(counts["unexplained"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
