"""Run Megatron-LM's own unit tests without and with the patches, and say what the patches change.

    python -m scripts.replay --megatron PATH_OR_URL [--release 0.18.2] [--ranks 1,2,4] [--device cpu|gpu]

Takes a Megatron-LM repository (or clones one), unpacks the tag of each release beside it, and runs the suites of
ci/replay.toml, plain and patched in separate processes, as many side by side as the machine has cores for.
With `compare = "failures"`, and in every suite with --failures, what passes with the patches does not run without them:
it is "passing". Each other test is still passing, fixed, newly failing, failing either way, skipped, or not run, with
the cause. What fails newly, and what hangs or crashes in one of the two, runs once more by itself before it counts;
with --resume, what hung in both, too. Once two cases of a parametrized test hang, its other cases do not run. Writes a
table for each release as JSON and Markdown, with the versions that it was made with; the Markdown of this repository is
in ci/replay.

Ends with 1 if a test is newly failing or was not run; with 2 if the arguments cannot be used or no test has run.

Needs torch, pytest and emerging-optimizers; Megatron itself comes from the repository. On cpu everything runs in a
rehearsal (no GPU is used), and tests that need a GPU say so. Only names of upstream's tests are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megatron_mtp_patches.megatrons.known import REFS
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from scripts import study
from scripts.common.arguments import make_parser, numbers, one_of
from scripts.common.process import ROOT
from scripts.common.toml import read_toml

from . import report
from .jobs import Job, run
from .source import UNIT_TESTS, Repository, SourceError, Tree
from .verdicts import NEW, NOT_ASKED, NOT_RUN, Outcomes, Verdict, doubtful, judge_all

SETTINGS = read_toml(ROOT / "ci" / "replay.toml")


class Pair(NamedTuple):
    plain: Job
    patched: Job
    failures_only: bool = False  # what passes patched does not run plain


def main() -> int:
    parser = make_parser("scripts.replay", __doc__)
    parser.add_argument("--megatron", required=True, metavar="PATH_OR_URL", help="Megatron-LM")
    parser.add_argument("--release", action="append", help="only this one; may be repeated")
    suites, text = [suite["name"] for suite in SETTINGS["suite"]], "only this suite of ci/replay.toml; may be repeated"
    parser.add_argument("--suite", action="append", type=one_of(suites), help=text)
    text = "only this test file, below tests/unit_tests; may be repeated"
    parser.add_argument("--file", action="append", metavar="PATH", help=text)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="how many ranks (default: 1,2,4)")
    parser.add_argument("--failures", action="store_true", help='`compare = "failures"` for every suite')
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit of each release and number of ranks")
    parser.add_argument("--resume", action="store_true", help="take what an earlier run left in the work folder")
    parser.add_argument("--work", type=Path, default=ROOT / ".replay", help="where trees are unpacked and logs are")
    parser.add_argument("--out", type=Path, help="folder of the tables (default: the work folder)")
    options = parser.parse_args()
    options.work = options.work.resolve()
    try:
        repository = Repository(options.megatron, options.work)
        releases = options.release or ([repository.version()] if repository.plain else list(REFS))
        for release in releases:
            repository.check(release)
        return int(sum(replay_release(release, repository, options) for release in releases) > 0)
    except SourceError as error:
        parser.error(str(error))


def replay_release(release: str, repository: Repository, options: argparse.Namespace) -> int:
    """Write the tables of a release; how much is bad there."""
    console = Console()
    tree = repository.unpack(release)
    verdicts = {}
    for ranks in options.ranks:
        if pairs := make_pairs(options, repository, tree, ranks):
            verdicts[ranks] = replay(pairs, f"{release}, {study.count_ranks(ranks)}", options, console)
    counts = [report.totals(one) for one in verdicts.values()]
    if not any(sum(one.values()) - one[NOT_RUN] for one in counts):
        raise SourceError(
            f"{release}: no test has run. Either no suite of ci/replay.toml does on --ranks "
            f"{','.join(map(str, options.ranks))}, or --minutes are too few, or the Python lacks a package; "
            f"see the logs in {options.work / 'records'}."
        )
    tables, kind = options.out or options.work / "tables", kind_of_table(options.device)
    files = share_out(tree)
    left_out = {one["reason"]: files[one["reason"]] for one in SETTINGS["left_out"]}
    report.write(tables / kind, release, about(tree, options.device), verdicts, left_out)
    report.make_table(release, verdicts).show()
    console.print(f"-> {tables / kind / release}.md, .json")
    bad = [
        f"newly failing on {ranks}: {test}: {verdict.cause}"
        for ranks, one in verdicts.items()
        for test, verdict in one.items()
        if verdict.word == NEW
    ]
    for line in bad:
        console.print(line, markup=False, style="red")
    return len(bad) + sum(one[NOT_RUN] for one in counts)


def make_pairs(options: argparse.Namespace, repository: Repository, tree: Tree, ranks: int) -> list[Pair]:
    """One pair for each suite that runs on this release and number of ranks; files of another commit need a history."""
    shares = share_out(tree)
    pairs = []
    for suite in SETTINGS["suite"]:
        name, ref = suite["name"], suite.get("ref")
        if name not in (options.suite or [name]):
            continue
        if ranks not in suite.get("ranks", (1, 2)) or tree.release not in suite.get("on", [tree.release]):
            continue
        files = [repository.take(tree, ref, file) for file in suite["files"]] if ref else shares[name]
        files = [file for file in files if file and file in (options.file or [file])]
        base = options.work / "records" / f"{tree.folder.name} {ranks} {name}"
        plain, patched = (
            Job(
                tree.folder,
                files,
                ranks,
                options.device,
                patches,
                Path(f"{base} {word}"),
                suite.get("only", ""),
            )
            for word, patches in (("plain", "none"), ("patched", "all"))
        )
        if files:
            pairs.append(Pair(plain, patched, options.failures or suite.get("compare") == "failures"))
    return pairs


def share_out(tree: Tree) -> dict[str, list[str]]:
    """{name of a suite, or reason to leave out: test files of the tree}; each file is in one of them."""
    tests = tree.folder / UNIT_TESTS
    left = {str(path.relative_to(tests)) for path in tests.rglob("test_*.py") if "_of_" not in path.stem}
    *named, everything_else = [(suite["name"], suite["files"]) for suite in SETTINGS["suite"] if "ref" not in suite]
    left_out = [(one["reason"], one["files"]) for one in SETTINGS["left_out"]]
    shares = {}
    for name, patterns in [*named, *left_out, everything_else]:
        matching = [str(path.relative_to(tests)) for pattern in patterns for path in sorted(tests.glob(pattern))]
        shares[name] = [file for file in dict.fromkeys(matching) if file in left]
        left -= set(shares[name])
    return shares


def replay(pairs: list[Pair], what: str, options: argparse.Namespace, console: Console) -> dict[str, Verdict]:
    """{test: verdict}; as many pairs run at once as the machine has cores for."""
    until = time.monotonic() + 60 * options.minutes
    cores, ranks = os.cpu_count() or 1, pairs[0].plain.ranks
    progress = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console)
    with (
        progress,
        ThreadPoolExecutor(max(1, cores // ranks)) as jobs,
        ThreadPoolExecutor(max(1, cores // (2 * ranks))) as judging,
    ):

        def start(job: Job, what: str) -> Future[Outcomes]:
            bar = progress.add_task(f"{what}, {'plain' if job.patches == 'none' else 'patched'}", total=None)
            return jobs.submit(run, job, until, options.resume, lambda ended: progress.update(bar, completed=ended))

        def run_pair(pair: Pair, what: str) -> list[Outcomes]:
            if not pair.failures_only:
                return [one.result() for one in (start(pair.plain, what), start(pair.patched, what))]
            patched = start(pair.patched, what).result()
            rest = [test for test, (outcome, _) in patched.items() if outcome != "passed"]
            plain = start(by_name(pair.plain, rest, "failures"), what).result() if rest else {}
            return [dict.fromkeys(patched, NOT_ASKED) | plain, patched]

        def judge(pair: Pair) -> dict[str, Verdict]:
            plain, patched = run_pair(pair, what)
            again = [test for test in {**plain, **patched} if doubtful(test, plain, patched)]
            if again:
                alone = Pair(by_name(pair.plain, again, "again"), by_name(pair.patched, again, "again"))
                for outcomes, new in zip((plain, patched), run_pair(alone, f"{what}, once more"), strict=True):
                    outcomes |= {test: new[test] for test in again if test in new}
            return judge_all(plain, patched, SETTINGS.get("cause", []), options.device)

        return {test: verdict for verdicts in judging.map(judge, pairs) for test, verdict in verdicts.items()}


def by_name(job: Job, tests: list[str], word: str) -> Job:
    """The same job with `tests` alone, and nothing before them; `word` tells its outcome file from the job's own."""
    names = [test.removeprefix(f"{UNIT_TESTS}/") for test in tests]
    return replace(job, files=names, outcome_file=Path(f"{job.outcome_file} {word}"), outcomes={})


def kind_of_table(device: str) -> str:
    """The folder of its tables: a rehearsal has others with TransformerEngine than without."""
    return "cpu-transformer-engine" if device == "cpu" and find_spec("transformer_engine") else device


def about(tree: Tree, device: str) -> dict[str, str]:
    import torch

    packages = ("torch", "emerging-optimizers", "transformer-engine")
    name = "a rehearsal on CPU" if device == "cpu" else torch.cuda.get_device_name()
    where = {"Megatron-LM": tree.commit[:12] or tree.release, "device": name}
    return where | dict.fromkeys(packages, "absent") | study.versions(*packages)


if __name__ == "__main__":
    sys.exit(main())
