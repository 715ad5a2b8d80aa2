"""The rehearsal that docs/ms-swift.md shows, and other commands of ms-swift with its model and data.

Runs are forks of a process that has imported ms-swift.
"""

import json
import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_command
from tests.pages import read_with_patches, shown
from tests.warm.processes import run_ranks

from .save_model import save

collect_ignore_glob = [] if find_spec("swift") else ["test_*.py"]

COMMAND = Path(__file__).with_name("command.py")


@dataclass
class Logged:
    """The lines of logging.jsonl about losses of the training, those about losses of the evaluation, and all output."""

    training: list[dict]
    evaluation: list[dict]
    output: str


def read_log(folder, words, output):
    """What a command of these words has Logged, which ran in `folder`."""
    file = folder / words[words.index("--output_dir") + 1] / "logging.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return Logged([line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line], output)


@pytest.fixture(scope="session")
def shown_commands(tmp_path_factory):
    """{what it does: (words, MEGATRON_MTP_PATCHES)} of the commands that the page shows."""
    text = shown("ms-swift-repairs") + shown("ms-swift-rehearsal")
    names = ("save", "repairs", "train", "resume")
    return dict(zip(names, read_with_patches(text, tmp_path_factory.mktemp("page")), strict=True))


@pytest.fixture(scope="session")
def folder(shown_commands, tmp_path_factory):
    """A folder with the one that the page saves the model and the data in."""
    os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1"}
    import megatron_mtp_patches
    import tqdm
    from megatron_mtp_patches import rehearsal

    tqdm.tqdm.monitor_interval = 0  # it would start a thread, with which no fork is safe
    rehearsal.install()
    megatron_mtp_patches.apply()
    from swift.megatron import megatron_sft_main  # noqa: F401

    folder = tmp_path_factory.mktemp("ms-swift")
    (*program, saved), _ = shown_commands["save"]
    assert program == ["python", "-m", save.__module__]
    save(folder / saved)
    return folder


@pytest.fixture(scope="session")
def run_words(folder):
    """run_words(words, ranks=1, patches="all", fault=..., refused=False): what a command of ms-swift Logged.

    `fault` acts on each rank before the run. `refused` is the code of a run that is to be refused, whose output is
    returned.
    """

    def enter(words, ranks, patches, fault):
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        os.chdir(folder)
        fault()
        run_command(patches, "run", "--device", "cpu", str(COMMAND), *words)

    def run(words, ranks=1, patches="all", fault=lambda: None, refused=False):
        ended = run_ranks(ranks, partial(enter, words, ranks, patches, fault))
        text = "".join(rank.output for rank in ended)
        codes = {rank.code for rank in ended}
        assert refused in codes if refused else codes == {0}, text[-6000:]  # ranks are killed when another one fails
        if refused:
            return text
        return read_log(folder, words, text)

    return run


@pytest.fixture(scope="session")
def run_shown(shown_commands, run_words):
    """run_shown(name, fault=...): what a command of the page Logged."""

    def run(name, **faults):
        (program, *words), patches = shown_commands[name]
        ranks = 1
        if program == "torchrun":
            option, count, *module = words[:4]
            assert (option, module) == ("--nproc-per-node", ["-m", "megatron_mtp_patches"])
            ranks, words = int(count), words[4:]
        assert words[:4] == ["run", "--device", "cpu", "tests/frameworks/ms_swift/command.py"]
        return run_words(words[4:], ranks, patches, **faults)

    return run


@pytest.fixture(scope="session")
def megatron(shown_commands, run_words):
    """megatron(command, data, output, steps, *arguments, ranks=1, fault=..., refused=False): what it Logged.

    Its other arguments are those that the page has in $ARGS.
    """
    words, _ = shown_commands["repairs"]
    shared = words[words.index("sft") + 1 : words.index("--output_dir")]

    def run(command, data, output, steps, *arguments, **options):
        own = ["--dataset", f"swift_output/{data}.jsonl", "--output_dir", output, "--train_iters", str(steps)]
        return run_words([command, *shared, *own, *arguments], **options)

    return run
