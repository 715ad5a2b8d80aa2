"""Accepted predictions are counted exactly, and before the loss may overwrite the logits."""

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    _compute_mtp_acceptance_counts,
    _mtp_logits_are_vocab_sharded,
)

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("mtp-acceptance-rate")]


class OutputLayer:
    gather_output = True


def test_correct_predictions_count_where_the_mask_is_not_zero():
    logits = torch.eye(4)[torch.tensor([[0, 1], [2, 3], [1, 1]])]  # [s 3, b 2, v 4]
    labels = torch.tensor([[0, 2, 2], [1, 0, 1]])
    mask = torch.tensor([[1.0, 0, 1], [1, 1, 0.5]])
    correct, total = _compute_mtp_acceptance_counts(logits, labels, mask, OutputLayer(), None)
    assert (correct.item(), total.item()) == (3, 5)
    assert correct.dtype == total.dtype == torch.int64


@pytest.mark.parametrize("gathers, asked, sharded", [(True, None, False), (False, None, True), (True, False, True)])
def test_whether_logits_are_sharded(gathers, asked, sharded):
    layer = OutputLayer()
    layer.gather_output = gathers
    assert _mtp_logits_are_vocab_sharded(layer, asked) is sharded


def test_a_loss_that_overwrites_the_logits_changes_no_count(make_model, batch, monkeypatch):
    """TransformerEngine's fused cross entropy overwrites them with the gradient: softmax, minus one at the label."""
    model = make_model(mtp_num_layers=1)
    model(**batch)
    expected = {key: MTPLossLoggingHelper.tracker[key].clone() for key in ("correct_values", "total_values")}
    compute_loss = type(model).compute_language_model_loss

    def overwrite(self, labels, logits):
        loss = compute_loss(self, labels, logits)
        with torch.no_grad():
            logits.data.neg_()
        return loss

    MTPLossLoggingHelper.tracker = {}
    monkeypatch.setattr(type(model), "compute_language_model_loss", overwrite)
    model(**batch)
    assert all(torch.equal(MTPLossLoggingHelper.tracker[key], expected[key]) for key in expected)


def count_steps(model, batch, steps):
    """Return, for each of `steps` steps, whether predictions were counted."""
    counted = []
    for _ in range(steps):
        model(**batch)
        counted.append(bool(MTPLossLoggingHelper.tracker["total_values"].any()))
        MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, None)
    return counted


@pytest.mark.parametrize("interval, expected", [(1, [1, 1, 1, 1]), (3, [1, 0, 0, 1]), (0, [0, 0, 0, 0])])
def test_the_interval_says_how_often_to_count(make_model, batch, interval, expected):
    model = make_model(mtp_acceptance_interval=interval)
    assert count_steps(model, batch, 4) == [bool(one) for one in expected]


def test_an_impossible_interval_is_refused(make_model):
    from types import SimpleNamespace

    from megatron_overrides.mtp.metrics.checks import check_cuda_graphs

    with pytest.raises(ValueError, match="--mtp-acceptance-interval .* -1: give a number of steps"):
        make_model(mtp_acceptance_interval=-1)
    for name in ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules"):
        check_cuda_graphs(SimpleNamespace(**{name: "full_iteration"}, mtp_acceptance_interval=1))
        with pytest.raises(ValueError, match="set the interval to 1 or 0"):
            check_cuda_graphs(SimpleNamespace(**{name: ["full_iteration"]}, mtp_acceptance_interval=2))


def test_interval_0_does_not_read_the_logits(make_model, batch, monkeypatch):
    from megatron_overrides.mtp.losses import head_losses

    def fail(*args):
        raise AssertionError("counted")

    monkeypatch.setattr(head_losses, "most_likely_token", fail)
    make_model(mtp_acceptance_interval=0)(**batch)
    with pytest.raises(AssertionError, match="counted"):
        make_model()(**batch)
