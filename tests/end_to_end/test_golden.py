"""Short training runs print the numbers of ci/golden.json: losses, norms, acceptance rates.

If TransformerEngine is installed, they train with its layers. `pytest tests/end_to_end/test_golden.py --update-golden`
writes the numbers of the installed release again. Do this if a change is meant to move them, and say why in the commit.
"""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from megatron_mtp_patches import rehearsal

from .test_training import LAYOUTS, needs_trainer

pytestmark = pytest.mark.forked("megatron")
GOLDEN = Path(__file__).resolve().parents[2] / "ci" / "golden.json"
NAMES = ("lm loss", "mtp_1 loss", "grad norm", "mtp grad norm", "mtp_1 acceptance %")
KEY = metadata.version("megatron-core")
CHOSEN = [*LAYOUTS]
LAYERS = []
if rehearsal.with_transformer_engine():
    KEY, LAYERS = f"{KEY} with TransformerEngine", ["--transformer-impl", "transformer_engine"]
    MOMENTS = ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
    CHOSEN += [
        pytest.param(
            (2, ["--use-distributed-optimizer", "--bf16", "--use-precision-aware-optimizer", *MOMENTS]),
            id="DP2, precision-aware optimizer",
            marks=needs_trainer,
        ),
        pytest.param(
            (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
            id="TP2, sequence parallel",
            marks=needs_trainer,
        ),
    ]
# A rehearsal of Megatron's trainer prints the first, the loop that replaces the trainer on 0.16.1 the second.
TRAINS_WITH_TRANSFORMER_ENGINE = r"TransformerEngine [\d.]+ with its kernels in torch|attention: TEDotProductAttention"
# Another processor or torch adds in another order, and the difference grows over 12 steps. Norms have three digits.
TOLERANCE = {name: {"rel": 2e-3, "abs": 1.1e-3} for name in NAMES}
TOLERANCE["mtp_1 acceptance %"] = {"abs": 1.7}  # two tokens of the 124 of a step


@pytest.mark.parametrize("layout", CHOSEN)
def test_numbers_are_the_golden_ones(train, license_dataset, layout, request):
    ranks, flags = layout
    run = request.node.callspec.id
    flags = [*flags, *LAYERS, "--mtp-detach-heads", "--mtp-clip-grad", "0.05", "--grad-norm-skip-threshold", "1000"]
    _, output = train(*flags, ranks=ranks, data=license_dataset)
    assert bool(re.search(TRAINS_WITH_TRANSFORMER_ENGINE, output)) is bool(LAYERS)
    assert bool(re.search(r" exp_avg_dtype \.+ torch.bfloat16", output)) is ("--exp-avg-dtype" in flags)
    seen = {name: values for name in NAMES if (values := values_of(name, output))}
    assert {len(values) for values in seen.values()} == {12}
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if request.config.getoption("update_golden", False):
        golden.setdefault(KEY, {})[run] = seen
        text = json.dumps(golden, indent=1, sort_keys=True)
        GOLDEN.write_text(re.sub(r"(?<=[\[\d,])\s+(?=[\d\]])", "", text) + "\n", encoding="utf-8")
    assert seen.keys() == golden[KEY][run].keys()
    for name, values in golden[KEY][run].items():
        assert seen[name] == pytest.approx(values, **TOLERANCE[name]), name


def values_of(name, output):
    return [float(value) for value in re.findall(rf"\| {re.escape(name)}: +(\S+) \|", output)]
