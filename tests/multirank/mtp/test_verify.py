"""verify() says in a running process what the MTP loss trains, and leaves no trace."""

import copy

import megatron_mtp_patches
import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]


in_each_layout = pytest.mark.parametrize(
    "make", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], indirect=True, ids=str
)


@pytest.fixture
def make(request, parallel, make_gpt):
    """make(**settings): a HeadTraining on these ranks, in a layout if the test asks for one."""
    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    sizes = getattr(request, "param", {})
    parallel(**sizes)
    return lambda **settings: HeadTraining(
        [make_gpt(VOCABULARY, LENGTH, pipeline_dtype=torch.float32, **sizes, **settings)]
    )


def drop_groups(tracker):
    return {key: value for key, value in tracker.items() if isinstance(value, torch.Tensor)}


def verify(training):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = copy.deepcopy(drop_groups(MTPLossLoggingHelper.tracker))
    before = [param.detach().clone() for chunk in training.model for param in chunk.parameters()]
    verification = megatron_mtp_patches.verify(training.model, training.optimizer, lambda: training.run_schedule(0))
    params = [param for chunk in training.model for param in chunk.parameters()]
    assert all(map(torch.equal, params, before)) and not any(param.main_grad.any() for param in params)
    after = drop_groups(MTPLossLoggingHelper.tracker)
    assert after.keys() == tracker.keys() and all(map(torch.equal, after.values(), tracker.values()))
    return verification


@in_each_layout
def test_detached_heads_train_alone(make):
    verification = verify(make(mtp_detach_heads=True))
    assert verification.ok and len(verification.heads) > 10 and not verification.others
    assert all("mtp.layers." in name for name in verification.heads)
    assert verification.norms[None] == 0.0 < verification.norms["mtp"]
    assert "parameters of the heads and nothing else" in str(verification)


def test_disabled_heads_are_refused(make):
    training = make(disable_mtp_loss=True)
    with pytest.raises(megatron_mtp_patches.PatchError, match="disable-mtp-loss .* leaves the MTP loss out"):
        verify(training)


@in_each_layout
def test_attached_heads_also_train_the_main_model(make):
    verification = verify(make())
    assert not verification.ok and "output_layer.weight" in verification.others
    assert verification.norms[None] > 0 and "mtp" not in verification.norms
    assert "--mtp-detach-heads keeps it out of them" in str(verification)


def test_a_model_without_heads_has_nothing_to_verify(make):
    verification = verify(make(mtp_num_layers=None))
    assert not verification.ok and not verification.heads and not verification.others
    assert "has reached no parameter at all" in str(verification)


def test_a_gradient_of_another_loop_is_not_silenced(make):
    training = make(mtp_detach_heads=True)

    def another_loop():
        for chunk in training.model:
            for param in chunk.parameters():
                param.main_grad.fill_(1.0)

    verification = megatron_mtp_patches.verify(training.model, training.optimizer, another_loop)
    assert not verification.ok and "No step of Megatron's schedules was seen" in str(verification)


@in_each_layout
def test_a_step_that_would_update_is_an_error_and_changes_nothing(make):
    training = make(mtp_detach_heads=True)
    before = [param.detach().clone() for chunk in training.model for param in chunk.parameters()]
    with pytest.raises(megatron_mtp_patches.PatchError, match="forward and backward only"):
        megatron_mtp_patches.verify(training.model, training.optimizer, lambda: training.step(0))
    assert all(map(torch.equal, (param for chunk in training.model for param in chunk.parameters()), before))
    assert "step" not in vars(training.optimizer)
    training.step(0)


def test_wrong_arguments_are_an_error(make):
    training = make()
    with pytest.raises(TypeError, match="is not a Megatron optimizer"):
        megatron_mtp_patches.verify(training.optimizer, training.model, lambda: None)
    with pytest.raises(TypeError, match="give a function that runs a step"):
        megatron_mtp_patches.verify(training.model, training.optimizer, training.run_schedule(0))


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_aux_loss_coeff": 0.1,
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    "settings", [{"hidden_dropout": 0.1, "attention_dropout": 0.1}, EXPERTS], ids=["dropout", "MoE"]
)
def test_training_goes_on_as_if_nothing_had_been_verified(parallel, make_gpt, settings):
    from megatron.core.transformer.moe import moe_utils

    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    parallel()
    ends = []
    for verifies in (False, True):
        training = HeadTraining([make_gpt(VOCABULARY, LENGTH, mtp_detach_heads=True, **settings)])
        training.step(1)
        scale = moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale
        if verifies:
            assert verify(training).ok
        assert moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale is scale
        training.step(2)
        named = [*training.bare[0].named_parameters(), *training.bare[0].named_buffers()]
        ends.append({name: tensor.detach().clone() for name, tensor in named})
    without, after = ends
    assert all(torch.equal(after[name], without[name]) for name in without)


def test_reverted_patches_verify_nothing(make, unpatched):
    training = make(mtp_num_layers=None)
    with unpatched(), pytest.raises(megatron_mtp_patches.PatchError, match="apply"):
        megatron_mtp_patches.verify(training.model, training.optimizer, lambda: None)
