"""Save a training on one release and go on from its checkpoint on another: each step has to have the same numbers.

    python -m scripts.resume_on_newer_release --python 0.18.2=PYTHON --python 0.19.2=PYTHON

Needs a Python for the default release and the reference. Ends with 1 where a number differs.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from megatron_mtp_patches.megatrons.known import DEFAULT, REFERENCE

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT, environment, run_or_exit
from scripts.study import launcher

STEPS, SAVED_AT, RANKS = 6, 3, 2
FLAGS = f"""
    --transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --clip-grad 0.5 --bf16
    --use-distributed-optimizer --mtp-num-layers 2 --mtp-detach-heads --mtp-clip-grad 0.05 --split 100,0,0
    --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --save-interval {SAVED_AT} --exit-interval {STEPS}
""".split()
DEMO = ROOT / "scripts" / "demo"
FORMATS = ("torch", "torch_dist")
NUMBER = re.compile(r"(learning rate|lm loss|mtp_\d loss|grad norm|mtp_\d acceptance %): +(\S+) \|")


def rehearse(python: str, ranks: int, script: str, *words: str) -> str:
    """The output of a script of the demo."""
    program = ["-m", "megatron_mtp_patches", "run", "--device", "cpu", str(DEMO / script)]
    variables = environment(CUDA_DEVICE_MAX_CONNECTIONS="1")
    return run_or_exit([*launcher(python, ranks), *program, *words], variables)


def train(python: str, *flags: str) -> dict[int, dict[str, str]]:
    """The numbers of each step that a training logs, by their names."""
    output = rehearse(python, RANKS, "train.py", *FLAGS, *flags)
    return {int(step): dict(NUMBER.findall(line)) for step, line in re.findall(r"iteration +(\d+)/(.*)", output)}


def main() -> int:
    parser = make_parser("scripts.resume_on_newer_release", __doc__)
    add_pythons(parser)
    pythons = parser.parse_args().python
    before, after = pythons[DEFAULT], pythons[REFERENCE]
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "data"))
        rehearse(before, 1, "dataset.py", data, str(ROOT / "LICENSE"))
        for checkpoint_format in FORMATS:
            checkpoint = Path(folder, checkpoint_format)
            flags = ["--data-path", data, "--ckpt-format", checkpoint_format]
            straight = train(before, *flags, "--save", str(checkpoint))
            (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT), encoding="utf-8")
            resumed = train(after, *flags, "--load", str(checkpoint))
            expected = {step: numbers for step, numbers in straight.items() if step > SAVED_AT}
            is_same = resumed == expected and len(expected) == STEPS - SAVED_AT and all(expected.values())
            differing += not is_same
            result = "goes on as it was" if is_same else f"has {resumed} instead of {expected}"
            print(f"a checkpoint of {DEFAULT} in the format {checkpoint_format}, on {REFERENCE}: {result}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
