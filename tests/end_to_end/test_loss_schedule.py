"""A schedule of the MTP loss: a resumed run goes on as it was, and a main model that does not learn from it stays."""

import re

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from .conftest import HAS_TRAINER, HEADS

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.guards("schedule-mtp-loss-weight"),
    pytest.mark.skipif(not HAS_TRAINER, reason="the 0.16.1 wheel has no megatron.training"),
]
# of the optimizer each parameter's state, and no gaps of memory that nothing has written to
SAVES = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
SCHEDULE = ("--mtp-loss-scaling-schedule", "0:0.3,25%:0.2,75%:0.1")  # of 12 iterations
WEIGHTS = ["0.300"] * 3 + ["0.200"] * 6 + ["0.100"] * 3
CONSTANT = ("--mtp-loss-scaling-schedule", "0:0.3")
PIPELINE = ("--pipeline-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer", "--bf16")
LAYOUTS = {
    "alone": (1, ()),
    "DP2, distributed optimizer": (2, SHARDED),
    "PP2, two chunks each": (2, (*PIPELINE, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")),
    "TP2, layer-wise Muon": (2, ("--bf16", "--optimizer", "dist_muon", "--tensor-model-parallel-size", "2")),
}
SAVED_AT = 6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_goes_on_as_it_was(train, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    flags = (*flags, *SAVES, *SCHEDULE)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    lines, _ = train(*flags, "--save", str(straight), ranks=ranks)
    assert weights(lines) == dict(enumerate(WEIGHTS, start=1))
    (straight / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    lines, _ = train(*flags, "--load", str(straight), "--save", str(resumed), ranks=ranks)
    assert weights(lines) == dict(list(enumerate(WEIGHTS, start=1))[SAVED_AT:])
    assert not differing(saved(resumed), saved(straight))


def test_one_weight_trains_as_a_constant_factor(train, tmp_path):
    train(*SAVES, "--save", str(tmp_path / "factor"))
    train(
        *CONSTANT, *SAVES, "--save", str(tmp_path / "schedule"), heads=(*HEADS[:2], "--mtp-loss-scaling-factor", "0.7")
    )
    assert not differing(saved(tmp_path / "schedule"), saved(tmp_path / "factor"))


def test_the_main_model_of_detached_heads_keeps_its_bits(train, tmp_path):
    detached = (*SAVES, "--mtp-detach-heads", "--mtp-clip-grad", "1.0")
    train(*detached, "--save", str(tmp_path / "factor"))
    _, output = train(*detached, *SCHEDULE, "--save", str(tmp_path / "schedule"))
    assert output.count("(TransformerConfig.mtp_loss_scaling_schedule) hardly acts") == 1
    assert "the updates of adam do not depend on the size of gradients" in output
    factor, schedule = (saved(tmp_path / name) for name in ("factor", "schedule"))
    assert differing(factor, schedule) == {name for name in factor if "mtp." in name}


def weights(lines):
    """{iteration: the weight in its line}"""
    return {i: re.search(r"mtp loss scaling factor: (\S+) \|", rest)[1] for i, (*_, rest) in lines.items()}


def saved(folder):
    """{name: tensor} of the model and of the state of the optimizer in the last checkpoint."""
    dcp_to_torch_save(folder / "iter_0000012", folder / "whole")
    whole = torch.load(folder / "whole", weights_only=False)
    return {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}


def differing(one, other):
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}
