"""Complete training runs of a small GPT. Each rank is a fork, except those of test_front_door.py."""

import importlib.util
import logging
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.pages import read_with_patches
from tests.warm.processes import LIMIT, run_ranks

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scripts" / "demo"
HAS_TRAINER = importlib.util.find_spec("megatron.training") is not None  # not in the wheel of 0.16.1
TRAIN = DEMO / "train.py" if HAS_TRAINER else Path(__file__).with_name("core_loop.py")

ITERATIONS = 12
ARGUMENTS = f"""
    --transformer-impl local
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 2 --global-batch-size 4
    --train-iters {ITERATIONS} --seed 1234 --clip-grad 1.0 --lr 5e-3 --min-lr 1e-3 --lr-decay-style cosine
    --lr-warmup-iters 0 --weight-decay 0.1 --adam-beta2 0.95 --split 98,2,0 --tokenizer-type NullTokenizer
    --vocab-size 256 --make-vocab-size-divisible-by 8 --log-interval 1 --tensorboard-log-interval 1
    --eval-interval 100000 --eval-iters 1 --save-interval 6 --ckpt-format torch
""".split()
HEADS = ("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.3")
LINE = re.compile(r"iteration +(\d+)/.*?learning rate: (\S+) \|.*?lm loss: (\S+) \|.*?grad norm: (\S+) \|(.*)")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the numbers of this run to ci/golden.json")


def build_dataset(prefix, *texts):
    (ended,) = run_ranks(1, partial(run_script, DEMO / "dataset.py", str(prefix), *texts))
    assert ended.code == 0, ended.output
    return prefix


def run_script(script, *arguments):
    """Run `script` in this process, as `python SCRIPT ARGUMENTS` would."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def run_command(patches, *words):
    """Run `megatron-mtp-patches WORDS` with these patches, in this process."""
    from megatron_mtp_patches.cli import main

    connections = "8" if "--use-megatron-fsdp" in words else "1"  # Megatron insists on either
    os.environ |= {"MEGATRON_MTP_PATCHES": patches, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    logging.getLogger().handlers.clear()  # those of pytest print nothing
    sys.path.insert(0, "")  # the folder of the script replaces it
    sys.exit(main(words))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The demo's dataset: the standard library's sources as bytes."""
    return build_dataset(tmp_path_factory.mktemp("data") / "stdlib")


@pytest.fixture(scope="session")
def license_dataset(tmp_path_factory):
    """A text that is the same with every Python. Its paragraphs are documents, because Megatron samples documents."""
    folder = tmp_path_factory.mktemp("data")
    texts = []
    for number, paragraph in enumerate((ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")):
        texts.append(folder / f"{number}.txt")
        texts[-1].write_text(paragraph, encoding="utf-8")
    return build_dataset(folder / "license", *map(str, texts))


@pytest.fixture(scope="session")
def train(dataset, tmp_path_factory):
    """train(*flags, ranks=1, patches="all"): ({iteration: (learning rate, loss, norm, rest)}, all output).

    `command` is "run" or "verify-mtp", `code` the exit code that it must have, `data` the prefix of another dataset,
    `heads` the flags of the MTP heads. With torchrun=True the ranks are interpreters that torchrun starts.
    """

    def run(*flags, ranks=1, patches="all", command="run", code=0, data=dataset, heads=HEADS, torchrun=False):
        tensorboard = ["--tensorboard-dir", str(tmp_path_factory.mktemp("tensorboard"))]
        arguments = [*ARGUMENTS, *heads, *tensorboard, *flags, "--data-path", str(data)]
        words = [command, "--device", "cpu", str(TRAIN), *arguments]
        if torchrun:
            codes, output = launch(ranks, patches, *words)
        else:
            ended = run_ranks(ranks, partial(run_command, patches, *words))
            codes, output = {rank.code for rank in ended}, "".join(rank.output for rank in ended)
        assert codes == {code}, output[-6000:]
        return {int(i): tuple(rest) for i, *rest in LINE.findall(output)}, output

    return run


@pytest.fixture
def run_shown(tmp_path):
    """run_shown(text, replaced): what each command of a block of a page prints; all of them must end with 0.

    `replaced` has the words that stand in place of a word of the page; the demo's script is in place of upstream's.
    """

    def in_folder(patches, words):
        os.chdir(tmp_path)
        run_command(patches, *words)

    def run(words, patches, replaced):
        program, *words = words
        ranks = 1
        if program == "torchrun":
            assert words[0::2][:2] == ["--nproc-per-node", "-m"] and words[3] == "megatron_mtp_patches"
            ranks, words = int(words[1]), words[4:]
        words = [one for word in words for one in replaced.get(word, [word])]
        ended = run_ranks(ranks, partial(in_folder, patches, words))
        output = "".join(rank.output for rank in ended)
        assert {rank.code for rank in ended} == {0}, output[-6000:]
        return output

    def run_block(text, replaced):
        replaced = {"pretrain_gpt.py": [str(TRAIN)], **replaced}
        return [run(words, patches, replaced) for words, patches in read_with_patches(text, tmp_path)]

    return run_block


def launch(ranks, patches, *words):
    """Run torchrun ... -m megatron_mtp_patches WORDS. Return {its exit code} and its output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}",
        "MEGATRON_MTP_PATCHES": patches,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [*launcher, "-m", "megatron_mtp_patches", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    return {done.returncode}, done.stdout + done.stderr
