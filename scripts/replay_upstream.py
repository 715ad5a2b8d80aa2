#!/usr/bin/env python3
"""Run Megatron-LM's own unit tests without and with the patches, and say what the patches change.

    scripts/replay_upstream.py --megatron PATH_OR_URL [--release 0.18.2] [--patch ID] [--ranks 1,2,4] [--device cpu|gpu]

Takes a Megatron-LM repository (or clones one), unpacks the tag of each release beside it, and runs the suites of
ci/replay.toml that a patch can touch: plain and patched side by side, in processes of their own. Each test is still
passing, fixed, newly failing, failing either way, skipped, or not run, with the cause; a table of them is written as
JSON and Markdown. What fails newly, hangs or crashes is run once more by itself before it counts. Ends with 1 if
anything is newly failing or was not run, or does not pass any more that did in the tables of --expected, with 2 if the
arguments cannot be used or no test has run. ci/replay has the tables of this repository; each names the versions of
torch, emerging-optimizers and TransformerEngine that it was made with.

Run it with the Python that has torch, pytest and emerging-optimizers; Megatron itself comes from the repository. On cpu
everything runs in a rehearsal (no GPU is used); tests that need one say so. Nothing of upstream is kept but names.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

try:
    import tomllib
except ImportError:
    import tomli as tomllib

from pythons import numbers
from replay import process, report, verdicts
from replay.source import UNIT_TESTS, Repository, SourceError, Tree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "ci" / "replay.toml").read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", required=True, metavar="PATH_OR_URL", help="Megatron-LM")
    parser.add_argument("--release", action="append", help="only this one; may be repeated")
    parser.add_argument("--patch", help="apply this patch alone, and run the suites that it touches")
    parser.add_argument("--suite", action="append", help="only this suite of ci/replay.toml; may be repeated")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="how many ranks (default: 1,2,4)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit of each release and number of ranks")
    parser.add_argument("--resume", action="store_true", help="take what an earlier run left in the work folder")
    parser.add_argument("--work", type=Path, default=ROOT / ".replay", help="where trees are unpacked and logs are")
    parser.add_argument("--out", type=Path, help="folder of the tables (default: the work folder)")
    parser.add_argument("--expected", type=Path, help="folder of earlier tables: what passed there has to pass here")
    options = parser.parse_args()
    console = Console()
    options.work = options.work.resolve()
    try:
        repository = Repository(options.megatron, options.work)
        releases = options.release or ([repository.version()] if repository.plain else list(SETTINGS["refs"]))
        check(options, releases, repository)
        bad = 0
        for release in releases:
            tree = repository.unpack(release, SETTINGS["refs"].get(release, release))
            found = {}
            for ranks in options.ranks:
                suites = [suite for suite in suites_for(options) if applies(suite, release, ranks)]
                if repository.plain:
                    suites = [suite for suite in suites if "ref" not in suite]
                jobs = make_jobs(options, repository, tree, suites, ranks)
                if any(plain.files for plain, _ in jobs):
                    found[ranks] = replay(jobs, ranks, options, console, release)
            counts = [report.totals(one) for one in found.values()]
            if not any(sum(one.values()) - one[verdicts.NOT_RUN] for one in counts):
                raise SourceError(
                    f"{release}: no test has run. Either no suite of ci/replay.toml does on --ranks "
                    f"{','.join(map(str, options.ranks))}, or --minutes are too few, or the Python lacks a package; "
                    f"see the logs in {options.work / 'records'}."
                )
            bad += sum(one[verdicts.NEW] + one[verdicts.NOT_RUN] for one in counts)
            tables = options.out or options.work / "tables"
            folder = tables / kind_of_table(options.device)
            without = tables / options.device if folder.name != options.device else None
            report.write(folder, release, about(tree, options.device), found, without)
            show(console, release, found)
            console.print(f"-> {folder / release}.md, .json")
            if options.expected:
                lost = report.lost(options.expected / kind_of_table(options.device) / f"{release}.json", found)
                bad += len(lost)
                for line in lost:
                    console.print(line, markup=False, style="red")
    except SourceError as error:
        parser.error(str(error))
    return int(bad > 0)


def check(options: argparse.Namespace, releases: list[str], repository: Repository) -> None:
    """Names that nothing answers to are an error that lists those that do."""
    from megatron_mtp_patches.catalog import CATALOG

    known = [patch.id for patch in CATALOG]
    if options.patch and options.patch not in known:
        raise SourceError(f"--patch {options.patch}: there is no such patch. There are: {', '.join(known)}")
    names = [suite["name"] for suite in SETTINGS["suite"]]
    for name in set(options.suite or ()) - set(names):
        raise SourceError(f"--suite {name!r}: ci/replay.toml has no such suite. It has: {', '.join(map(repr, names))}")
    for release in releases if options.expected else ():
        if not (table := options.expected / kind_of_table(options.device) / f"{release}.json").is_file():
            raise SourceError(f"--expected {options.expected}: there is no {table}. Make it with --out.")
    if not suites_for(options):
        raise SourceError(f"no suite of ci/replay.toml touches --patch {options.patch}.")
    for release in releases:
        if repository.plain and release != repository.version():
            raise SourceError(
                f"--release {release}: {repository.plain} is {repository.version()} and has no history. Leave "
                f"--release out, or give a git repository."
            )
        if repository.git and release not in SETTINGS["refs"]:
            repository.commit(release)  # a tag, branch or commit of its own


def suites_for(options: argparse.Namespace) -> list[dict]:
    return [
        suite
        for suite in SETTINGS["suite"]
        if (not options.patch or options.patch in suite["patches"])
        and (not options.suite or suite["name"] in options.suite)
    ]


def applies(suite: dict, release: str, ranks: int) -> bool:
    return ranks in suite.get("ranks", (1, 2)) and release in suite.get("on", [release])


def make_jobs(
    options: argparse.Namespace, repository: Repository, tree: Tree, suites: list[dict], ranks: int
) -> list[tuple[process.Job, process.Job]]:
    """(plain, patched): one pair for the tree's own tests, one for each suite of somewhere else."""
    own = [suite for suite in suites if "ref" not in suite]
    tests = tree.folder / UNIT_TESTS
    files = [path for suite in own for pattern in suite["files"] for path in sorted(tests.glob(pattern))]
    sets = [("", [str(path.relative_to(tests)) for path in files if "_of_" not in path.stem], "")]
    for suite in suites:
        if "ref" in suite:
            taken = [repository.take(tree, suite["ref"], file) for file in suite["files"]]
            sets.append((suite["ref"].replace("/", "_"), taken, suite.get("only", "")))
    pairs = []
    for name, names, only in sets:
        record = options.work / "records" / f"{tree.folder.name} {ranks} {name}"
        plain, patched = (
            process.Job(tree.folder, names, ranks, options.device, patches, Path(f"{record} {word}"), only)
            for word, patches in (("plain", "none"), ("patched", options.patch or "all"))
        )
        if names:
            pairs.append((plain, patched))
    return pairs


def replay(
    jobs: list[tuple[process.Job, process.Job]], ranks: int, options: argparse.Namespace, console: Console, release: str
) -> dict[str, verdicts.Verdict]:
    """{test: verdict}"""
    until = time.monotonic() + 60 * options.minutes
    found: dict[str, verdicts.Verdict] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(2) as pool:
        for pair in jobs:
            what = f"{release}, {ranks} rank{'s' * (ranks > 1)}"
            plain, patched = run_pair(pair, what, until, options.resume, progress, pool)
            tests = {**plain, **patched}
            doubtful = [test for test in tests if verdicts.doubtful(test, plain, patched)]
            if doubtful:
                again = run_pair(by_itself(pair, doubtful), f"{what}, once more", until, options.resume, progress, pool)
                for outcomes, new in zip((plain, patched), again, strict=True):
                    outcomes |= {test: new[test] for test in doubtful if test in new}
            found |= verdicts.judge_all(plain, patched, SETTINGS.get("cause", []), options.device)
    return found


def run_pair(
    pair: tuple[process.Job, process.Job],
    what: str,
    until: float,
    resume: bool,
    progress: Progress,
    pool: ThreadPoolExecutor,
) -> list[dict]:
    """Both at once: what each one's tests came to."""
    running = []
    for job, word in zip(pair, ("plain", "patched"), strict=True):
        task = progress.add_task(f"{what}, {word}", total=None)
        seen = functools.partial(progress.update, task)
        running.append(pool.submit(process.run, job, until, resume, lambda n, seen=seen: seen(completed=n)))
    return [one.result() for one in running]


def by_itself(pair: tuple[process.Job, process.Job], tests: list[str]) -> tuple[process.Job, ...]:
    """The same jobs with `tests` alone, and nothing before them."""
    names = [test.removeprefix("tests/unit_tests/") for test in tests]
    return tuple(replace(job, files=names, record=Path(f"{job.record} again"), outcomes={}) for job in pair)


def kind_of_table(device: str) -> str:
    """The folder of its tables: a rehearsal has others with TransformerEngine than without."""
    return "cpu-transformer-engine" if device == "cpu" and find_spec("transformer_engine") else device


def about(tree: Tree, device: str) -> dict[str, str]:
    import torch

    versions = {}
    for package in ("torch", "emerging-optimizers", "transformer-engine"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    name = "a rehearsal on CPU" if device == "cpu" else torch.cuda.get_device_name()
    return {"Megatron-LM": tree.commit[:12] or tree.release, "device": name, **versions}


def show(console: Console, release: str, found: report.Verdicts) -> None:
    table = Table("ranks", *verdicts.VERDICTS, title=f"{release}: upstream's unit tests, plain -> patched")
    for ranks, one in found.items():
        counts = report.totals(one)
        style = "red" if counts[verdicts.NEW] else ""
        table.add_row(str(ranks), *(str(counts[word]) for word in verdicts.VERDICTS), style=style)
    console.print(table)
    for ranks, one in found.items():
        for test, verdict in one.items():
            if verdict.word == verdicts.NEW:
                console.print(f"newly failing on {ranks}: {test}: {verdict.cause}", markup=False, style="red")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "patches"))
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
