"""The losses of the heads of mcore-bridge's GPTModel: its own by default, those of Megatron's models by settings."""

import inspect

import megatron_mtp_patches
import pytest
import torch

pytest.importorskip("mcore_bridge", reason="mcore-bridge is not installed")

from mcore_bridge.model.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from .conftest import BATCH, LENGTH

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-heads-in-mcore-bridge"), pytest.mark.ranks(1, 2)]


@pytest.fixture
def unpatched(monkeypatch):
    """unpatched(): from now on mcore-bridge computes the losses."""
    return lambda: monkeypatch.setattr(GPTModel, "_postprocess", inspect.unwrap(GPTModel._postprocess))


def masked(batch):
    """Labels of which some do not count, and a mask over more of them."""
    labels, mask = batch["labels"].clone(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    labels[:, :3], mask[0, 8] = -100, 0
    return {"labels": labels, "loss_mask": mask}


class Capped(GPTModel):
    """A class that caps its logits, as Gemma 4 does; those of heads are capped, too."""

    def _forward_output_layer(self, hidden_states, *args, **kwargs):
        return 2.0 * torch.tanh(super()._forward_output_layer(hidden_states, *args, **kwargs) / 2.0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"mtp_shared_weights": True}, {"calculate_per_token_loss": True}, {"model_class": Capped}],
    ids=lambda settings: "".join(settings),
)
def test_the_default_is_mcore_bridges_own_loss(train, batch, unpatched, settings):
    gradients, tracker = train(**masked(batch), **settings)
    unpatched()
    own_gradients, own_tracker = train(**masked(batch), **settings)
    assert gradients.keys() == own_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, own_gradients[name], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(tracker["values"], own_tracker["values"])


def test_a_mask_of_mtp_pass_counts_no_label_that_mcore_bridge_ignores(train, batch):
    labels, mask = masked(batch).values()
    gradients, _ = train(labels, mask, mtp_detach_heads=True)
    with megatron_mtp_patches.mtp_pass(True, loss_mask=mask):
        gradients_of_pass, _ = train(labels, torch.ones_like(mask), mtp_detach_heads=True)
    heads = [name for name in gradients if "mtp" in name]
    assert heads and all(torch.equal(gradients_of_pass[name], gradients[name]) for name in heads)


@pytest.mark.parametrize("loss_type", ["tv", "e2e_tv"])
def test_losses_for_acceptance_are_those_of_whole_logits(make_model, batch, train, from_all_ranks, loss_type):
    from tests.oracles.losses.whole_logits import expected_losses

    model, shards = make_model(), []
    model.output_layer.register_forward_hook(lambda layer, args, output: shards.append(output[0].detach().double()))
    model(**batch)
    logits = [torch.cat(from_all_ranks(shard), dim=-1) for shard in shards]
    _, tracker = train(mtp_loss_type=loss_type, mtp_logits_chunk_size=8)
    assert tracker["values"].tolist() == pytest.approx(expected_losses(logits, loss_type), rel=1e-5)


def test_heads_over_a_frozen_main_model_train_as_detached_ones(train):
    frozen, _ = train(freeze_base_model_for_mtp=True)
    detached, _ = train(mtp_detach_heads=True)
    assert frozen and frozen.keys() == {name for name in detached if name.startswith("mtp.")}
    assert all(torch.equal(gradient, detached[name]) for name, gradient in frozen.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"mtp_depth_weights": "3,1"},
        {"mtp_depth_weights": "3,1", "mtp_shared_weights": True},
        {"mtp_position_weights": "dpace"},
        {"mtp_position_weights": "dpace", "mtp_dpace_alpha": 0.1},
        {"mtp_loss_type": "kl"},
        {"mtp_loss_type": "lk"},
    ],
    ids=str,
)
def test_a_setting_changes_what_trains_the_heads(train, settings):
    shared = {"mtp_shared_weights": settings.get("mtp_shared_weights", False)}
    plain, _ = train(mtp_detach_heads=True, **shared)
    other, _ = train(mtp_detach_heads=True, **settings)
    assert not any(torch.equal(other[name], plain[name]) for name in plain if name.startswith("mtp."))
    assert all(torch.equal(other[name], plain[name]) for name in plain if not name.startswith("mtp."))


def test_chunks_train_as_the_logits_of_all_positions(train):
    whole, _ = train()
    chunked, _ = train(mtp_logits_chunk_size=8)
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("interval", [0, 1])
def test_the_acceptance_rate_is_counted_in_the_steps_of_its_interval(train, interval):
    _, tracker = train(mtp_acceptance_interval=interval)
    assert bool(tracker.get("total_values", torch.zeros(1)).any()) is bool(interval)


@pytest.mark.parametrize("has_labels", [True, False])
def test_without_gradients_the_heads_run_in_an_mtp_pass_alone(make_model, batch, has_labels):
    model, calls = make_model(mtp_acceptance_length_interval=1), []
    model.mtp.register_forward_hook(lambda *arguments: calls.append("mtp"))
    if not has_labels:
        batch["labels"] = None
    with torch.no_grad():
        model(**batch)
        assert not calls
        with megatron_mtp_patches.mtp_pass(compute=True) as metrics:
            model(**batch)
    means = metrics.reduce()
    assert calls and means["mtp_1 loss"] > 3.0 and means["mtp acceptance length"] >= 1.0
    assert not MTPLossLoggingHelper.tracker
