"""The scheduled weight reaches the losses of the heads, the log and each chunk of a model, or an error says why not."""

import logging
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_overrides.mtp.loss_weight.checks import (
    check_heads_to_schedule,
    check_schedule,
    warn_of_normalized_updates,
)
from megatron_overrides.mtp.loss_weight.current import set_scheduled_weight
from megatron_overrides.mtp.loss_weight.schedule import Progress

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("schedule-mtp-loss-weight")]
SCHEDULE = "0:0.25,2:0.5"


@pytest.mark.parametrize("depths", [1, 2])
def test_the_gradients_are_those_of_the_weight(make_model, batch, gradients, depths):
    constant = make_model(mtp_num_layers=depths, mtp_loss_scaling_factor=0.5)
    scheduled = make_model(mtp_num_layers=depths, mtp_loss_scaling_schedule=SCHEDULE)
    expected = gradients(constant, constant(**batch))
    for done, is_alike in ((1, False), (2, True), (7, True)):
        set_scheduled_weight(torch.nn.Sequential(scheduled), Progress(done))
        actual = gradients(scheduled, scheduled(**batch))
        assert all(torch.equal(actual[name], expected[name]) for name in expected) is is_alike


def test_each_chunk_of_a_model_gets_the_weight(make_model):
    chunks = [make_model(mtp_loss_scaling_schedule=SCHEDULE) for _ in range(2)]
    assert chunks[0].config is not chunks[1].config
    set_scheduled_weight(chunks, Progress(0))
    assert [chunk.config.mtp_loss_scaling_factor for chunk in chunks] == [0.25, 0.25]


def test_a_hybrid_model_gets_the_weight(train_hybrid):
    (model,) = train_hybrid(mtp_loss_scaling_schedule=SCHEDULE).bare
    set_scheduled_weight([model], Progress(2))
    assert model.config.mtp_loss_scaling_factor == 0.5


def test_the_weight_of_the_step_is_logged(make_model, batch):
    model = make_model(mtp_num_layers=1, mtp_loss_scaling_schedule="0:0.3")
    set_scheduled_weight([model], Progress(0))
    model(**batch)
    report = {}
    MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, None, total_loss_dict=report)
    assert report["mtp_loss_scaling_factor"].item() == 0.3
    assert megatron_mtp_patches.metrics()["mtp loss scaling factor"] == 0.3


def test_without_a_schedule_nothing_is_set_or_logged(make_model, batch):
    model = make_model(mtp_num_layers=1, mtp_loss_scaling_factor=0.7)
    set_scheduled_weight([model], Progress(5))
    model(**batch)
    report = {}
    MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, None, total_loss_dict=report)
    assert model.config.mtp_loss_scaling_factor == 0.7 and "mtp_loss_scaling_factor" not in report


@pytest.mark.parametrize("settings", [{}, {"freeze_base_model_for_mtp": True}])
def test_a_trainer_that_tells_no_iteration_is_refused(make_model, batch, settings):
    model = make_model(mtp_num_layers=1, mtp_loss_scaling_schedule=SCHEDULE, **settings)
    with torch.no_grad(), megatron_mtp_patches.mtp_pass(compute=True):
        model(**batch)  # a validation does not need the weight
    with pytest.raises(
        NotImplementedError, match=r"\(\w+Config.mtp_loss_scaling_schedule\) has no effect: .* do not know"
    ):
        model(**batch)


def test_a_schedule_without_heads_is_refused():
    check_heads_to_schedule(SimpleNamespace(mtp_loss_scaling_schedule=SCHEDULE, mtp_num_layers=1))
    with pytest.raises(ValueError, match=r"requires MTP heads: add --mtp-num-layers"):
        check_heads_to_schedule(SimpleNamespace(mtp_loss_scaling_schedule=SCHEDULE, mtp_num_layers=None))


def test_the_configuration_refuses_what_cannot_be_meant(make_model):
    with pytest.raises(ValueError, match="the points do not ascend"):
        make_model(mtp_loss_scaling_schedule="0:0.3,0:0.1")
    with pytest.raises(ValueError, match="must be one of step, linear, not 'cosine'"):
        make_model(mtp_loss_scaling_schedule_style="cosine")


@pytest.mark.parametrize(
    "graphs, is_refused",
    [
        ({"cuda_graph_impl": "full_iteration"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration_inference"}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}, False),
    ],
)
def test_a_graph_of_the_whole_iteration_is_refused(graphs, is_refused):
    check_schedule(SimpleNamespace(**graphs))
    scheduled = SimpleNamespace(**graphs, mtp_loss_scaling_schedule=SCHEDULE)
    if not is_refused:
        check_schedule(scheduled)
        return
    with pytest.raises(ValueError, match="a CUDA graph of the whole iteration repeats"):
        check_schedule(scheduled)


@pytest.mark.parametrize(
    "changed, warns",
    [
        ({}, True),
        ({"optimizer": "dist_muon"}, True),
        ({"optimizer": "muon", "mtp_detach_heads": False, "freeze_base_model_for_mtp": True}, True),
        ({"optimizer": "sgd"}, False),
        ({"mtp_detach_heads": False}, False),
        ({"mtp_loss_scaling_schedule": None}, False),
    ],
)
def test_a_schedule_that_hardly_acts_is_named(caplog, changed, warns):
    run = {"mtp_loss_scaling_schedule": SCHEDULE, "mtp_detach_heads": True, "optimizer": "adam"}
    with caplog.at_level(logging.WARNING):
        warn_of_normalized_updates(SimpleNamespace(**run | changed))
    assert ("hardly acts" in caplog.text) is warns


def test_a_step_outside_of_a_run_of_megatron_s_trainer_keeps_its_weight():
    """As in upstream's tests of train_step, which set no arguments."""
    from megatron_overrides.mtp.loss_weight.trainer_step import schedule_weight

    class Step(dict):
        def proceed(self):
            return "taken"

    assert schedule_weight(Step(iteration=3, model=[])) == "taken"
