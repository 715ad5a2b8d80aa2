"""Where `doctor` names no wrong number, the repairs change no bit of a training: in layouts, over drawn flags.

Nor do all patches with MTP heads, labels and Adam: nothing in docs/patches.md, "On without any flag", trains there.

Compared are the losses and norms of the log, and what a checkpoint holds: weights, moments of the optimizer, which have
each bit of the norm by which gradients are clipped, and random states. The pages of the patches say which other numbers
of the log change.
"""

import json
import random
from functools import partial
from itertools import count

import pytest

from tests.warm.processes import run_ranks

from .conftest import ARGUMENTS, HEADS, run_command
from .test_training import needs_trainer

pytestmark = [pytest.mark.forked("megatron"), needs_trainer]
STEPS = 3
COMPARED = (1, 3)  # the log line of step 2 has the losses of two steps without log-first-step-once
ALWAYS = f"""
    --untie-embeddings-and-output-weights --num-attention-heads 4 --clip-grad 0.1
    --train-iters {STEPS} --save-interval {STEPS}
""".split()
DRAWN = (
    "--normalization RMSNorm",
    "--qk-layernorm",
    "--disable-bias-linear",
    "--group-query-attention --num-query-groups 2",
    "--bf16",
    "--micro-batch-size 1",
    "--rotary-percent 0.5",
)
SPARSE = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 "
    "--expert-model-parallel-size 2"
)
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
LAYOUTS = {
    "DP2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "TP2": "--tensor-model-parallel-size 2",
    "PP2, heads": " ".join(("--pipeline-model-parallel-size 2", *HEADS)),
    "EP2, heads": " ".join((SPARSE, *HEADS)),
    "Megatron-FSDP": f"{FSDP} --use-distributed-optimizer --no-gradient-accumulation-fusion",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_repairs_change_no_bit_of_a_run_without_a_known_defect(layout, train, tmp_path):
    flags = next(flags for flags in draws(LAYOUTS[layout].split()) if not wrong_numbers([*ARGUMENTS, *flags]))
    runs = []
    for patches in ("none", "repairs", "all")[: 3 if "heads" in layout else 2]:
        folder = tmp_path / patches
        lines, _ = train(*flags, "--save", str(folder), ranks=2, patches=patches, heads=())
        runs.append(([lines[step][:3] for step in COMPARED], dict(saved(folder))))
    (log, numbers), *patched = runs
    assert len(numbers) > 100
    for patched_log, patched_numbers in patched:
        assert patched_log == log, flags
        assert patched_numbers.keys() == numbers.keys()
        assert [where for where, value in numbers.items() if value != patched_numbers[where]] == [], flags


def draws(layout):
    """The flags of trainings in this layout, one after the other."""
    for seed in count():
        chosen = random.Random(f"{layout} {seed}").sample(DRAWN, 4)
        yield [*ALWAYS, *layout, *" ".join(chosen).split()]


def wrong_numbers(flags):
    """The ids of the defects that `doctor` names for these flags, of those that change what is trained."""
    words = ["doctor", "--json", "--world-size", "2", "--", *flags]
    (ended,) = run_ranks(1, partial(run_command, "repairs", *words))
    answer, _ = json.JSONDecoder().raw_decode(ended.output[ended.output.index("{") :])
    return [one["id"] for one in answer["defects"] if one["kind"] == "wrong numbers"]


def saved(folder):
    """(where, value) of what a checkpoint holds; a tensor or an array as its bytes."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (folder,) = folder.glob(f"iter_{STEPS:07}")
    if (folder / ".metadata").exists():
        dcp_to_torch_save(folder, folder / "whole.pt")
    for file in folder.glob("**/*.pt"):
        for where, value in walk(torch.load(file, weights_only=False), str(file.relative_to(folder))):
            if torch.is_tensor(value):
                value = value.contiguous().view(-1).view(torch.uint8).numpy()
            yield where, value.tobytes() if hasattr(value, "tobytes") else value


def walk(value, where):
    if isinstance(value, dict):
        for key, part in value.items():
            if key != "args":
                yield from walk(part, f"{where}:{key}")
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from walk(part, f"{where}:{place}")
    else:
        yield where, value
