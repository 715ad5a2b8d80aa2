"""Trainings with TransformerEngine's layers and optimizer, whose kernels a rehearsal stands in for."""

import re

import pytest
from megatron_mtp_patches import rehearsal

from .test_training import needs_trainer

pytestmark = [
    pytest.mark.forked("megatron"),
    needs_trainer,
    pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed"),
]
FLAGS = ["--mtp-detach-heads", "--mtp-clip-grad", "0.05"]
WITH = ["--transformer-impl", "transformer_engine"]
# Ranks, what only TransformerEngine does, what both do.
LAYOUTS = {
    "1 rank": (1, [], []),
    "precision-aware optimizer": (
        2,
        ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"],
        ["--use-distributed-optimizer", "--bf16"],
    ),
    "sequence parallelism": (2, ["--sequence-parallel"], ["--tensor-model-parallel-size", "2"]),
}
TOLERANCE = 5e-3  # of a loss of 5.5 at first; the optimizer's bf16 moments take most of it


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_megatron_s_own_layers_do(train, layout):
    ranks, more, both = LAYOUTS[layout]
    found, output = train(*FLAGS, *both, *more, *WITH, ranks=ranks)
    expected, without = train(*FLAGS, *both, ranks=ranks)
    told = r"TransformerEngine [\d.]+ with its kernels in torch"
    assert re.search(told, output) and not re.search(told, without)
    assert len(found) == len(expected) == 12
    losses = [[float(lines[i][1]) for i in sorted(lines)] for lines in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert float(re.findall(r"mtp grad norm: (\S+) \|", output)[-1]) > 0.05


def test_verification_finds_detached_heads_alone(train):
    _, output = train(
        *FLAGS, *WITH, "--tensor-model-parallel-size", "2", "--sequence-parallel", ranks=2, command="verify-mtp"
    )
    assert re.search(r"verify-mtp: the MTP loss has reached \d+ parameters of the heads and nothing else", output)
