"""A whole model called as an RL trainer calls it: without labels, and for log probabilities without gradients."""

import importlib

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_mtp_patches.engine.source import find_file

from megatron_overrides.mtp import forward_pass

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("derive-mtp-labels", "mtp-acceptance-length")]

OTHER_MODELS = (
    "megatron.core.models.hybrid.hybrid_model:HybridModel",
    "megatron.core.models.mamba.mamba_model:MambaModel",
)


@pytest.fixture
def count_calls(monkeypatch):
    """count_calls(model): from now on, how often its first MTP layer and its output layer run."""

    def count(model):
        calls = {"heads": 0, "output": 0}

        def counting(name):
            def hook(*_):
                calls[name] += 1

            return hook

        model.mtp.layers[0].register_forward_hook(counting("heads"))
        model.output_layer.register_forward_hook(counting("output"))
        return calls

    return count


def test_without_labels_the_heads_train_on_the_tokens(make_model, batch, gradients):
    """The gradients are those with the labels that a data set would make of these tokens."""
    model = make_model(mtp_detach_heads=True)
    inputs = {**batch, "labels": None, "loss_mask": None}
    logits = model(**inputs)
    assert logits.shape == (2, 12, 32)
    from_tokens = gradients(model, logits, weight=0.0)
    labels = torch.cat([batch["input_ids"][:, 1:], torch.zeros(2, 1, dtype=torch.long)], dim=1)
    known = torch.ones(2, 12)
    known[:, -1] = 0
    from_labels = gradients(model, model(**{**batch, "labels": labels, "loss_mask": known}), weight=0.0)
    assert from_tokens["mtp.layers.1.eh_proj.weight"].any()
    assert all(torch.equal(gradient, from_labels[name]) for name, gradient in from_tokens.items())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("has_labels", [False, True])
def test_without_gradients_the_heads_do_not_run(make_model, batch, count_calls, training, has_labels):
    model = make_model().train(training)
    inputs = batch if has_labels else {**batch, "labels": None}
    expected = model(**inputs)
    MTPLossLoggingHelper.tracker = {}
    calls = count_calls(model)
    with torch.no_grad():
        output = model(**inputs)
    assert torch.equal(output, expected)
    assert calls == {"heads": 0, "output": 1}
    assert MTPLossLoggingHelper.tracker == {}
    model(**inputs)
    assert calls == {"heads": 1, "output": 4}


class Quantizer(torch.nn.Module):
    """Stands for the quantizer that nvidia-modelopt puts into each layer."""

    __module__ = "modelopt.torch.quantization.nn"


def capture(*_):
    """Stands for the hook that nvidia-modelopt puts on the layers that it distils."""


capture.__module__ = "modelopt.torch.distill.distillation_model"


def add_quantizer(layer):
    layer.input_quantizer = Quantizer()


@pytest.mark.parametrize("observe", [add_quantizer, lambda layer: layer.register_forward_hook(capture)])
def test_without_gradients_the_heads_run_where_modelopt_observes_them(make_model, batch, count_calls, observe):
    """tests/compatibility uses the real modelopt."""
    model = make_model().eval()
    observe(model.mtp.layers[1].eh_proj)
    calls = count_calls(model)
    with torch.no_grad():
        model(**batch)
    assert calls == {"heads": 1, "output": 3}


def release(*_):
    """Stands for the hook with which Megatron-FSDP (here version 2, after 0.19) releases the weights it gathered."""


release.__module__ = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module"


def test_without_gradients_the_heads_run_without_their_logits_where_weights_are_released_after_them(
    make_model, batch, count_calls
):
    """tests/multirank uses the real Megatron-FSDP."""
    model = make_model().eval()
    with torch.no_grad():
        expected = model(**batch)
        model.mtp.layers[1].register_forward_hook(release)  # the model is wrapped after its first forward
        calls = count_calls(model)
        assert torch.equal(model(**batch), expected)
    assert calls == {"heads": 1, "output": 1}


def test_a_model_in_eval_mode_still_trains_its_heads_if_there_are_gradients(make_model, batch, gradients):
    model = make_model()
    expected = gradients(model, model(**batch))
    assert all(torch.equal(g, expected[name]) for name, g in gradients(model, model.eval()(**batch)).items())


@pytest.mark.parametrize("has_labels", [False, True])
def test_hidden_states_of_heads_that_have_run_are_cut_off(make_model, batch, has_labels):
    """The case of the 1F1B overlap: its nodes run the heads, and their hidden states are there without gradients."""
    model = make_model()
    inputs = {"labels": batch["labels"] if has_labels else None, "loss_mask": batch["loss_mask"]}
    hidden = torch.randn(3 * 12, 2, 16, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    common = {name: batch[name] for name in ("input_ids", "position_ids")}
    common |= {"rotary_pos_emb": None, "rotary_pos_cos": None, "rotary_pos_sin": None, "mtp_in_postprocess": False}
    with torch.no_grad():
        output = model._postprocess(hidden, **common, **inputs)
    assert output.shape == ((2, 12) if has_labels else (2, 12, 32))


def test_a_stage_that_sends_hidden_states_of_heads_runs_them(make_model, batch):
    """If the loss is on another stage than the block, that stage expects the hidden states of the heads."""
    model = make_model()
    model.post_process = False
    with torch.no_grad():
        assert model(**batch).shape == (3 * 12, 2, 16)


class Entered(Exception):
    """Carries current(), as the model's own forward sees it, out of that forward."""


class StandIn:
    """Stands for a model with Mamba layers, which a CPU cannot build."""

    post_process = mtp_process = True
    pg_collection = None
    mtp = torch.nn.Module()

    def __init__(self):
        self.config = NotFrozen()

    def __getattr__(self, name):
        raise Entered(forward_pass.current())


class NotFrozen:
    """Its configuration; the forward pass has begun when it asks for anything else than these."""

    freeze_base_model_for_mtp = disable_mtp_loss = False

    def __getattr__(self, name):
        raise Entered(forward_pass.current())


@pytest.mark.parametrize("model", [model for model in OTHER_MODELS if find_file(model.partition(":")[0])])
@pytest.mark.parametrize("trains", [True, False])
def test_models_with_mamba_layers_record_their_tokens_too(model, trains):
    module, _, name = model.partition(":")
    forward = getattr(importlib.import_module(module), name).forward
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.set_grad_enabled(trains), pytest.raises(Entered) as entered:
        forward(StandIn(), tokens, None, None)
    (actual,) = entered.value.args
    assert actual.input_ids is tokens
    assert (actual.computes_loss, actual.is_idle) == (trains, not trains)


def test_under_the_overlap_of_experts_the_labels_come_from_the_tokens_of_the_main_model(
    make_model, batch, gradients, overlapped_gradients, experts
):
    """keep_tokens restores them after a head has rolled them."""
    model = make_model(**experts).bfloat16()
    inputs = {**batch, "labels": None}
    del inputs["loss_mask"]
    expected = gradients(model, model(**inputs), weight=0.0)
    assert expected["mtp.layers.0.eh_proj.weight"].any()
    got = overlapped_gradients(model, inputs)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())
