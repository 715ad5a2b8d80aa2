"""Heads that stay in the model and do not train: the run goes as one without heads, is resumed, and loads elsewhere."""

import pytest

from .conftest import HAS_TRAINER

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.guards("disable-mtp-loss"),
    pytest.mark.skipif(not HAS_TRAINER, reason="the 0.16.1 wheel has no megatron.training"),
]
DISABLED = "--disable-mtp-loss"
# tests/multirank/mtp/test_frozen_main_model.py has other layouts.
DP2 = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16"]
SAVED_AT = 6


def test_a_run_goes_as_without_heads_and_is_resumed(train, tmp_path):
    flags = [*DP2, "--ckpt-format", "torch_dist"]
    alone, _ = train(*flags, heads=(), ranks=2)
    straight, _ = train(*flags, DISABLED, "--save", str(tmp_path), ranks=2)
    assert not any("mtp" in line[3] for line in straight.values())
    assert [line[:3] for line in straight.values()] == [line[:3] for line in alone.values()]
    resumed, _ = train(*go_back(tmp_path), *flags, DISABLED, ranks=2)
    assert sorted(resumed) == list(range(SAVED_AT + 1, 13))
    # Megatron logs the first iteration of a process without resetting its sums
    same = [i for i in resumed if i > SAVED_AT + 2]
    assert [resumed[i] for i in same] == [straight[i] for i in same]


def test_its_checkpoint_trains_heads_with_new_optimizer_state_alone(train, tmp_path):
    """Without the patches, too."""
    flags = ["--ckpt-format", "torch_dist"]
    train(*flags, DISABLED, "--save", str(tmp_path))
    load = [*go_back(tmp_path), *flags, "--train-iters", str(SAVED_AT + 2)]
    _, output = train(*load, code=1)
    assert "is of a run with --disable-mtp-loss, so it has the optimizer state of the main model alone" in output
    for patches in ("all", "none"):
        lines, output = train(*load, "--no-load-optim", patches=patches)
        assert "mtp_1 loss" in output and sorted(lines) == [SAVED_AT + 1, SAVED_AT + 2]


def go_back(folder):
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    return ["--load", str(folder)]
