"""MTP heads with a learning rate of their own: the main model's numbers stay, and a resumed run goes on as it was."""

import pytest

from .conftest import HAS_TRAINER

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.guards("train-mtp-heads-at-own-rate"),
    pytest.mark.skipif(not HAS_TRAINER, reason="the 0.16.1 wheel has no megatron.training"),
]
RATES = ["--mtp-lr", "2e-2", "--mtp-min-lr", "1e-2", "--mtp-weight-decay", "0.3"]
DETACHED = ["--mtp-detach-heads", "--mtp-clip-grad", "1.0"]
# tests/multirank/mtp/test_resumed_head_rates.py has other layouts.
DP2 = ["--use-distributed-optimizer", "--bf16"]
SAVED_AT = 6


def test_a_resumed_run_goes_on_as_it_was(train, tmp_path):
    flags = [*DP2, *DETACHED, "--ckpt-format", "torch_dist"]
    plain, _ = train(*flags, ranks=2)
    straight, _ = train(*flags, *RATES, "--save", str(tmp_path), ranks=2)
    assert {i: values[:3] for i, values in straight.items()} == {i: values[:3] for i, values in plain.items()}
    assert straight[12][3] != plain[12][3]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    resumed, _ = train(*flags, *RATES, "--load", str(tmp_path), ranks=2)
    assert sorted(resumed) == list(range(SAVED_AT + 1, 13))
    # Megatron logs the first iteration of a process without resetting its sums
    same = [i for i in resumed if i > SAVED_AT + 2]
    assert [numbers(resumed[i]) for i in same] == [numbers(straight[i]) for i in same]


def numbers(line):
    """Learning rate, loss and norm of the main model, and what a line says of the heads, but for means so far."""
    *main, rest = line
    return *main, [part for part in rest.split("|") if "so far" not in part]
