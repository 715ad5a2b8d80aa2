"""Measuring in the ranks of another Python, and writing the result, for all studies."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.common.markdown import Table
from scripts.common.process import ROOT, environment, run_or_exit


def rehearse() -> None:
    """Have this process rehearse on the CPU as the only rank, with the patches."""
    from megatron_mtp_patches import rehearsal

    rehearsal.install()
    from scripts.tiny_gpt import start_process_groups

    start_process_groups()


def measure(
    python: str, module: str, *words: object, ranks: int = 1, device: str | None = None, patches: str = "all"
) -> Any:
    """Run `python -m MODULE FILE WORDS` on these ranks; return the JSON that it wrote to FILE.

    Args:
        device: "cpu" or "gpu", to have `megatron-mtp-patches run` prepare the process; else it does that itself.
    """
    program = ["-m", module]
    if device:
        script = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        kind = "cuda" if device == "gpu" else device
        program = ["-m", "megatron_mtp_patches", "run", "--device", kind, str(script)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        command = [*launcher(python, ranks), *program, str(file), *map(str, words)]
        run_or_exit(command, environment(patches, TORCHDYNAMO_DISABLE="1"))
        return json.loads(file.read_text(encoding="utf-8"))


def launcher(python: str, ranks: int) -> list[str]:
    """The words before `-m MODULE` that start it on these ranks."""
    here = ["--local-addr=127.0.0.1"]  # else it asks for this machine's name, which may have no answer
    return [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", *here, f"--nproc-per-node={ranks}"]


def write(file: Path, record: Any, title: str, tables: Iterable[Table], about: str = "") -> None:
    """Write FILE.json and FILE.md."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_name(f"{file.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    file.with_name(f"{file.name}.md").write_text(page(title, tables, about), encoding="utf-8")


def page(title: str, tables: Iterable[Table], about: str = "") -> str:
    """The Markdown of the tables, below `about`; one that has the title of the page gets no heading."""
    lines = [f"# {title}", "", *([about, ""] if about else [])]
    for table in tables:
        lines += table.section()[2 * (table.title == title) :]
    return "\n".join(lines)


def versions(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package).partition("+")[0]
    return installed


def installed_release() -> str:
    """The release of the Megatron that is imported here, without the commit of the repository that this is run in."""
    from megatron.core import package_info

    return package_info.__version__.partition("+")[0]


def check_release(release: str, installed: str) -> None:
    """End this process if the Python that was named for `release` has another Megatron."""
    if release[0].isdigit() and installed != release:
        sys.exit(f"the Python of {release} has megatron-core {installed}")


def count_ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def made_with() -> str:
    """Megatron and torch with their versions, in words."""
    return ", ".join(f"{name} {version}" for name, version in versions("megatron-core", "torch").items())
