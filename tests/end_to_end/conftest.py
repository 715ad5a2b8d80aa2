import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "demo"))

ITERATIONS = 12
ARGUMENTS = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --micro-batch-size 2 --global-batch-size 4
    --train-iters {ITERATIONS} --seed 1234 --clip-grad 1.0 --lr 5e-3 --min-lr 1e-3 --lr-decay-style cosine
    --lr-warmup-iters 0 --weight-decay 0.1 --adam-beta2 0.95 --split 98,2,0 --tokenizer-type NullTokenizer
    --vocab-size 256 --make-vocab-size-divisible-by 8 --log-interval 1 --tensorboard-log-interval 1
    --eval-interval 100000 --eval-iters 1 --save-interval 6 --ckpt-format torch
""".split()
LINE = re.compile(r"iteration +(\d+)/.*?learning rate: (\S+) \|.*?lm loss: (\S+) \|.*?grad norm: (\S+) \|(.*)")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write what is seen to ci/golden.json")


def build_dataset(prefix, *texts):
    subprocess.run([sys.executable, str(ROOT / "scripts/demo/build_dataset.py"), str(prefix), *texts], check=True)
    return prefix


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The demo's dataset: the standard library's sources as bytes."""
    return build_dataset(tmp_path_factory.mktemp("data") / "stdlib")


@pytest.fixture(scope="session")
def license_dataset(tmp_path_factory):
    """A text that is the same with every Python: its paragraphs, since Megatron deals out documents."""
    folder = tmp_path_factory.mktemp("data")
    texts = []
    for number, paragraph in enumerate((ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")):
        texts.append(folder / f"{number}.txt")
        texts[-1].write_text(paragraph, encoding="utf-8")
    return build_dataset(folder / "license", *map(str, texts))


@pytest.fixture(scope="session")
def train(dataset, tmp_path_factory):
    """train(*flags, ranks=1, patches="all"): ({iteration: (learning rate, loss, norm, rest)}, everything printed).

    `command` is "run" or "verify-mtp", `code` the exit code that it must end with, `data` another dataset's prefix.
    """

    def run(*flags, ranks=1, patches="all", command="run", code=0, data=dataset):
        launcher = [sys.executable, "-m"]
        if ranks > 1:
            launcher += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
        script = str(ROOT / "scripts/demo/train.py")
        words = [*launcher, "megatron_mtp_patches", command, "--device", "cpu", script, *ARGUMENTS, *flags]
        words += ["--data-path", str(data), "--tensorboard-dir", str(tmp_path_factory.mktemp("tensorboard"))]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}",
            "MEGATRON_MTP_PATCHES": patches,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
        output = done.stdout + done.stderr
        assert done.returncode == code, output[-6000:]
        return {int(i): tuple(rest) for i, *rest in LINE.findall(output)}, output

    return run
