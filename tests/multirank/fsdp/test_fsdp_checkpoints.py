"""Weights that are loaded or changed under Megatron-FSDP reach its main weights and the model."""

import pytest
import torch

from tests.trainings.fsdp import (
    Reference,
    about,
    assert_same,
    backward,
    batch_of,
    every_strategy,
    strategies_and_overlaps,
    train,
    whole,
)

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("fsdp-without-master-weights"), pytest.mark.ranks(2)]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
pytest.importorskip("transformer_engine", reason="a precision-aware optimizer is TransformerEngine's FusedAdam")


@pytest.fixture
def load():
    """load(training): weights that are no bf16 numbers, loaded as Megatron loads a checkpoint; returns them."""

    def load(training):
        state = training.model.state_dict_for_save_checkpoint()
        for value in state.values():  # what torch.distributed.checkpoint does
            value._local_tensor.mul_(-1.0).add_(1e-3)
        training.model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
        return {name: -weight + 1e-3 for name, weight in Reference(training.dtype).weights.items()}

    return load


@every_strategy
def test_training_goes_on_from_loaded_weights_without_the_optimizer_s(make_fsdp, load, strategy):
    """As with --finetune and --no-load-optim."""
    training, reference = make_fsdp(strategy), Reference(torch.bfloat16)
    loaded = load(training)
    training.optimizer.reload_model_params()
    assert_same(whole(training), loaded, rtol=0, atol=0)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in loaded.values())
    reference.start_from(loaded)
    right = reference.train(range(4))
    assert train(training, range(4)) == about(right)


@strategies_and_overlaps
def test_weights_loaded_in_place_reach_the_model(make_fsdp, strategy, overlap):
    """0.19 leaves load_state_dict out where it has loaded a GPT checkpoint into a hybrid model's buffers."""
    training, reference = make_fsdp(strategy, overlap=overlap), Reference(torch.bfloat16)
    change_model_weights(training, 1.0)  # also after a forward pass, which gathers weights
    training.model.state_dict_for_save_checkpoint()
    for _, param in training.model.module.param_and_grad_buffer.optimizer_named_parameters:
        param._local_tensor.mul_(-1.0)
    training.optimizer.reload_model_params()
    reference.start_from({name: -weight for name, weight in reference.weights.items()})
    ((right, _, _),) = reference.train([0])
    assert backward(training, 0) == pytest.approx(right, rel=1e-5)


def change_model_weights(training, factor):
    """After a forward pass the model shows the weights that it computes with; change those."""
    with torch.no_grad():
        training.model(batch_of(0, 0, training.dtype))
    for group in training.model.module.param_and_grad_buffer.parameter_groups:
        group.model_weight_buffer.data.mul_(factor)


@strategies_and_overlaps
def test_changed_model_weights_are_taken_over(make_fsdp, strategy, overlap):
    training, reference = make_fsdp(strategy, overlap=overlap), Reference(torch.bfloat16)
    change_model_weights(training, -2.0)
    training.optimizer.reload_model_params()
    changed = {name: -2.0 * weight for name, weight in reference.weights.items()}
    assert_same(whole(training), changed, rtol=0, atol=0)
    reference.start_from(changed)
    right = reference.train(range(3))
    assert train(training, range(3)) == about(right)


@every_strategy
def test_main_weights_keep_the_bits_that_the_model_s_have_not(make_fsdp, strategy):
    training = make_fsdp(strategy)
    train(training, range(2))
    before = whole(training)
    change_model_weights(training, 1.0)
    training.optimizer.reload_model_params()
    assert_same(whole(training), before, rtol=0, atol=0)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
