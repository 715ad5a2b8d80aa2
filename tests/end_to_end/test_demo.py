"""The experiments of the demo, at their smallest."""

import pytest

from scripts.demo import experiments, plots, runs

from .conftest import HAS_TRAINER

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.skipif(not HAS_TRAINER, reason="the 0.16.1 wheel has no megatron.training"),
]
TINY = """
    --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 24
    --max-position-embeddings 24 --micro-batch-size 2 --global-batch-size 2 --lr-warmup-iters 0 --log-interval 1
    --eval-iters 1 --untie-embeddings-and-output-weights
""".split()


def test_heads_by_two_losses_then_bad_batches(dataset, tmp_path, monkeypatch, capfd):
    for name, value in {"TEXTS": 2, "LENGTH": 20, "THRESHOLD": 1e-6}.items():
        monkeypatch.setattr(experiments, name, value)
    accident = experiments.Accident(2, 10, (range(4, 6),), ["--train-iters", "10", *TINY])
    runs.warm()
    shared = experiments.train_to_fork(dataset, tmp_path, accident)
    assert sorted(shared.loss) == [1, 2]
    before, after = experiments.losses(dataset, tmp_path, [*TINY, "--train-iters", "4", "--eval-interval", "2"])
    assert list(before.accepted_length) == list(after.accepted_length) == [2, 4]
    assert all(1 <= length <= 1 + experiments.DEPTHS for run in (before, after) for length in run.measured.values())
    assert before.loss == after.loss and before.mtp_loss != after.mtp_loss  # the main model is the same, frozen
    table = experiments.skipping(dataset, tmp_path, accident, shared)
    assert table.rows[-1] == ["updates skipped", "0", "8"]
    assert all((tmp_path / picture).exists() for picture in (plots.LOSSES, plots.SKIPPING))
    assert "cross_entropy    4/4  lm loss " in capfd.readouterr().out
