"""The command: in the process of the test, in a fork of it, or in a process that a test starts."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from .fresh_start import REPOSITORY, run_command


@pytest.fixture(scope="module", autouse=True)
def environment():
    """No colours, a terminal that is wide enough for any table, and nothing that chooses patches."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}.items():
            patch.setenv(name, value)
        for name in ("MEGATRON_MTP_PATCHES", "MEGATRON_MTP_PATCHES_ON_DRIFT"):
            patch.delenv(name, raising=False)
        yield


@dataclass(frozen=True)
class Printed:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """command(*words): run `megatron-mtp-patches` with these words in this process."""
    from megatron_mtp_patches.cli import main

    def run(*words: str) -> Printed:
        code = main(words)
        return Printed(code, *capsys.readouterr())

    return run


@pytest.fixture
def trainer():
    return pytest.importorskip("megatron.training.arguments", reason="the wheel of 0.16.1 has no trainer")


@pytest.fixture
def doctor(command, trainer):
    """doctor(flags, *words): what `doctor *words -- flags` returns and prints."""
    return lambda flags, *words: command("doctor", *words, "--", *flags.split())


@pytest.fixture
def doctor_of_file(command, trainer, tmp_path):
    """doctor_of_file(text, *words, name="run.sh"): what `doctor *words --batch` returns and prints of such a file."""

    def run(text, *words, name="run.sh"):
        file = tmp_path / name
        file.write_text(text)
        return command("doctor", *words, "--batch", str(file))

    return run


@pytest.fixture(scope="session")
def forked_command():
    """forked_command(*words, first=[folder], **environment): run it in a fork, which imports the package again."""
    return lambda *words, first=(), **environment: run_command(
        list(words), [*map(str, first), *REPOSITORY, *sys.path], environment
    )


@pytest.fixture(scope="session")
def rows():
    """rows(output): {first cell of a row of a table: the other cells}."""

    def read(output: str) -> dict[str, list[str]]:
        lines = [line.strip("│┃| ").split("│") for line in output.splitlines() if "│" in line]
        return {name.strip(): [cell.strip() for cell in rest] for name, *rest in lines}

    return read
