"""Upstream's own pretrain_gpt.py, unmodified, under the patches on CPU ranks.

    MEGATRON_LM=DIR[:DIR...] pytest tests/checkout

Each DIR is a Megatron-LM checkout (core_v0.16.1 and later, or main). Its dataset helpers are compiled on first use.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKOUTS = [Path(folder) for folder in os.environ.get("MEGATRON_LM", "").split(":") if folder]
if not CHECKOUTS:
    pytest.skip("say where Megatron-LM is: MEGATRON_LM=DIR[:DIR...]", allow_module_level=True)

pytestmark = pytest.mark.real_process("the checkout's Megatron shadows the one that warm processes have imported")

ITERATIONS, SAVED_AT = 20, 10
ARGUMENTS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS} --lr 1e-3
    --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters {ITERATIONS} --weight-decay 0.1 --clip-grad 1.0
    --log-interval 1
    --eval-interval 1000 --eval-iters 1
    --mock-data --split 99,1,0 --tokenizer-type NullTokenizer --vocab-size 128 --position-embedding-type rope
    --untie-embeddings-and-output-weights --mtp-num-layers 2 --bf16 --use-distributed-optimizer
    --mtp-detach-heads --mtp-clip-grad 0.05 --grad-norm-skip-threshold 1000
""".split()
LAYOUTS = {"1 rank": (1, []), "DP2": (2, []), "PP2": (2, ["--pipeline-model-parallel-size", "2"])}
NAMES = (
    "lm loss",
    "mtp_1 loss",
    "mtp_2 loss",
    "grad norm",
    "mtp grad norm",
    "mtp_1 acceptance %",
    "mtp_2 acceptance %",
)
LINE = re.compile(r"iteration +(\d+)/.*?" + "".join(rf" {name}: +(\S+) \|.*?" for name in NAMES))

every_checkout = pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)


def pretrain(checkout, ranks, arguments):
    """Run it; {iteration: the numbers of NAMES} as printed, and all that was printed."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    command = [*launcher, "megatron_mtp_patches", "run", "--device", "cpu", str(checkout / "pretrain_gpt.py")]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # its Makefile asks the python3 on PATH
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return {int(i): tuple(numbers) for i, *numbers in LINE.findall(output)}, output


@every_checkout
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_saves_and_resumes_where_it_was(checkout, layout, tmp_path):
    ranks, flags = LAYOUTS[layout]
    save = ["--save", str(tmp_path), "--save-interval", str(SAVED_AT)]
    straight, output = pretrain(checkout, ranks, [*ARGUMENTS, *flags, *save])
    assert sorted(straight) == list(range(1, ITERATIONS + 1))
    for place in (0, 1, 2):  # each loss falls
        assert float(straight[ITERATIONS][place]) < float(straight[1][place])
    assert "updates skipped for grad norm:   0 |" in output
    assert re.search(r"megatron_mtp_patches \.+ .*skip-update-on-large-grad-norm=(add|repair)", output)

    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    resumed, _ = pretrain(checkout, ranks, [*ARGUMENTS, *flags, "--load", str(tmp_path)])
    # Megatron logs the first iteration of a process without resetting its sums, so the second line after a resume
    # shows the mean losses of two iterations; its other numbers, and every other line, are that iteration's own.
    second = SAVED_AT + 2
    assert resumed.pop(second)[3:] == straight.pop(second)[3:]
    assert resumed == {i: numbers for i, numbers in straight.items() if i > SAVED_AT}


@every_checkout
def test_a_threshold_under_every_norm_trains_nothing(checkout):
    _, output = pretrain(checkout, 1, [*ARGUMENTS, "--grad-norm-skip-threshold", "1e-3", "--train-iters", "3"])
    assert re.findall(r"updates skipped for grad norm: +(\d+) \|", output) == ["1", "2", "3"]
    assert "number of skipped iterations:   1 |" in output  # Megatron's own count, of the log interval
    assert len(set(re.findall(r"learning rate: (\S+)", output))) == 1  # the schedule has not moved
