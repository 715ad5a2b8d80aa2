"""The models that ms-swift trains: with mtp_detach_heads the MTP loss leaves exactly zero outside the heads.

mcore-bridge's GPTModel, configuration and MTP layer over TransformerEngine's layers. What ms-swift puts around them
(a tokenizer, weights from a hub, its trainer) does not run.
"""

import pytest
import torch

pytest.importorskip("mcore_bridge", reason="mcore-bridge is not installed")

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from .conftest import BATCH, LENGTH, VOCABULARY

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-heads-in-mcore-bridge"), pytest.mark.ranks(1, 2)]


def reached(model, batch, main_loss=0.0):
    """The first names of the parameters that a gradient reaches; `main_loss` is a factor of the main model's loss."""
    (main_loss * model(**batch).mean()).backward()
    with_gradient = (name for name, param in model.named_parameters() if param.grad is not None and param.grad.any())
    return {name.partition(".")[0] for name in with_gradient}


@pytest.mark.parametrize(
    "settings", [{}, {"untie_embeddings_and_output_weights": False}, {"mtp_shared_weights": True}], ids=str
)
def test_the_mtp_loss_leaves_exactly_zero_outside_detached_heads(make_model, batch, settings):
    everything = {"embedding", "decoder", "mtp"} | ({"output_layer"} if "untie" not in str(settings) else set())
    assert reached(make_model(**settings), batch) == everything
    assert reached(make_model(mtp_detach_heads=True, **settings), batch) == {"mtp"}


def test_the_main_model_trains_as_without_heads(make_model, batch):
    gradients = []
    for settings in ({"mtp_num_layers": None}, {"mtp_detach_heads": True}):
        model = make_model(**settings)
        torch.manual_seed(3)
        with torch.no_grad():
            for name, param in sorted(model.named_parameters()):
                if not name.startswith("mtp."):
                    param.copy_(0.1 * torch.randn(param.shape))
        reached(model, batch, main_loss=1.0)
        gradients.append({name: p.grad for name, p in model.named_parameters() if not name.startswith("mtp.")})
    alone, beside_heads = gradients
    assert alone.keys() == beside_heads.keys() and len(alone) > 10
    assert all(torch.equal(alone[name], beside_heads[name]) for name in alone)


def test_detached_heads_train_as_attached_ones(train):
    (attached, _), (detached, _) = (train(mtp_detach_heads=is_detached) for is_detached in (False, True))
    heads = [name for name in attached if name.startswith("mtp.")]
    assert heads and all(torch.equal(attached[name], detached[name]) for name in heads)


def test_the_acceptance_rate_is_that_of_the_whole_vocabulary(make_model, batch, world_size, from_all_ranks):
    model = make_model(mtp_num_layers=1)
    projected = []
    model.output_layer.register_forward_hook(lambda layer, args, output: projected.append(output[0].detach()))
    model(**batch)
    predicted = torch.cat(from_all_ranks(projected[0]), dim=-1).argmax(-1)  # [s, b] of the head
    batch["labels"] = predicted.t().roll(1, dims=-1).contiguous()  # at each position the token that it predicts
    MTPLossLoggingHelper.tracker.clear()
    model(**batch)
    tracker = MTPLossLoggingHelper.tracker
    assert tracker["total_values"].item() == BATCH * (LENGTH - 1)  # the last position has no label
    assert tracker["correct_values"].item() == BATCH * (LENGTH - 1)
    assert len(predicted.unique()) > 2 and (world_size == 1 or predicted.max() >= VOCABULARY // 2)


@pytest.mark.parametrize(
    "settings", [{"mtp_loss_scaling_schedule": "0:0.3,9:0.1"}, {"mtp_eval": False}, {"disable_mtp_loss": True}], ids=str
)
def test_what_acts_in_megatron_s_trainer_alone_is_refused(make_model, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"\(\w+Config.{name}\) .* has no effect under mcore-bridge"):
        make_model(**settings)
