"""tag, grad_norms, decide, clip and update without the patches give the bits of a step of the patched Megatron."""

from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches import functional

pytestmark = pytest.mark.forked("patched")

# Adam's moments are compared through the parameters of the later steps.
STEPS = 3
KINDS = {
    "fp32": {},
    "fp32, distributed": {"distributed": True},
    "bf16": {"dtype": torch.bfloat16},
    "bf16, distributed": {"dtype": torch.bfloat16, "distributed": True},
}
SETTINGS = {
    "clipped": {"mtp_clip_grad": 0.05},
    "measured": {"clip_grad": 0.0},
    "skipped": {"grad_norm_skip_threshold": 1e-3},
    "heads left out": {"mtp_grad_norm_skip_threshold": 1e-3},
    "named group": {"grad_norm_group": [r"output=output_layer:0.01"]},
}


def by_patches(optimizer):
    """A step of the patched Megatron: whether it updated, the main norm, and that of the heads."""
    updated, norm, _ = optimizer.step()
    return updated, norm, optimizer.mtp_grad_norm


def by_functions(optimizer):
    """The same by the functions for custom trainers."""
    optimizer.prepare_grads()
    norms = functional.grad_norms(optimizer)
    decision = functional.decide(norms, optimizer.config)
    functional.clip(optimizer, norms, decision)
    return functional.update(optimizer, norms, decision), norms.total[None], norms.total["mtp"]


def give_gradients(model, step):
    model.zero_grad_buffer()
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    for param in model.parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator))


def train(model, optimizer, settings, step_optimizer):
    """Return what each step returns, and the parameters after it."""
    for name, value in settings.items():
        setattr(optimizer.config, name, value)
    results = []
    for step in range(STEPS):
        give_gradients(model, step)
        results.append((step_optimizer(optimizer), [param.detach().clone() for param in model.parameters()]))
    return results


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_bits_of_the_patches(make_training, unpatched, kind, settings):
    groups = SETTINGS[settings].get("grad_norm_group")
    model, optimizer = make_training(**KINDS[kind], groups=groups, separate_mtp_grad_clip=True)
    expected = train(model, optimizer, SETTINGS[settings], by_patches)
    with unpatched():
        model, optimizer = make_training(**KINDS[kind])
        functional.tag(model, optimizer)
        if groups:
            functional.tag(model, optimizer, group="output", match=lambda name: name.startswith("output_layer"))
        actual = train(model, optimizer, SETTINGS[settings], by_functions)
    for (results, params), (expected_results, expected_params) in zip(actual, expected, strict=True):
        assert results == expected_results and results[2] > 0
        assert all(map(torch.equal, params, expected_params))


@pytest.mark.parametrize("name", ["mtp_clip_grad", "mtp_grad_norm_skip_threshold"])
def test_a_setting_for_heads_that_are_not_tagged_is_an_error(make_training, name):
    model, optimizer = make_training()
    setattr(optimizer.config, name, 0.5)
    give_gradients(model, 0)
    optimizer.prepare_grads()
    norms = functional.grad_norms(optimizer)
    with pytest.raises(ValueError, match=rf"config.{name} needs tagged MTP heads: call tag"):
        functional.decide(norms, optimizer.config)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"grad_norm_skip_threshold": -1.0}, "would skip every update"),
        ({"grad_norm_skip_threshold": "5"}, "would skip every update"),
        ({"mtp_clip_grad": "0.5"}, "to clip to"),
    ],
)
def test_a_setting_that_is_no_limit_is_an_error(settings, message):
    from megatron_overrides.norms.values import GradNorms

    norms = GradNorms({None: 2.0, "mtp": 0.5}, {None: 2.0, "mtp": 0.5})
    with pytest.raises(ValueError, match=message):
        functional.decide(norms, SimpleNamespace(**settings))


def test_arguments_in_the_wrong_place_are_an_error(make_training):
    model, optimizer = make_training()
    give_gradients(model, 0)
    optimizer.prepare_grads()
    norms = functional.grad_norms(optimizer)
    decision = functional.decide(norms, optimizer.config)
    for config in (optimizer, model.config):
        with pytest.raises(TypeError, match=f"optimizer.config, not a {type(config).__name__}"):
            functional.decide(norms, config)
    for function in (functional.clip, functional.update):
        with pytest.raises(TypeError, match="returned, not a StepDecision"):
            function(optimizer, decision, norms)
        with pytest.raises(TypeError, match="or leave it out, not a bool"):
            function(optimizer, norms, False)
    with pytest.raises(TypeError, match="not a SimpleNamespace"):
        functional.decide(norms, SimpleNamespace())
    with pytest.raises(TypeError, match="takes a name of model.named_parameters"):
        functional.is_mtp_parameter(next(model.parameters()))


@pytest.mark.parametrize("function", [functional.grad_norms, lambda adam: functional.tag([], adam)])
def test_an_optimizer_of_torch_is_an_error(function):
    with pytest.raises(TypeError, match="Adam is not a Megatron optimizer"):
        function(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))


def test_clip_and_update_ask_for_an_optimizer_of_megatron(make_training):
    _, optimizer = make_training()
    norms = functional.grad_norms(optimizer)
    for function in (functional.clip, functional.update):
        with pytest.raises(TypeError, match="NoneType is not a Megatron optimizer"):
            function(None, norms)


@pytest.mark.parametrize("model", [None, "model", ["chunk"]])
def test_what_is_no_model_is_an_error(model):
    kind = "NoneType" if model is None else "str"
    with pytest.raises(TypeError, match=f"tag takes a model, or the list of its chunks, not a {kind}"):
        functional.tag(model)


def test_a_name_that_matches_nothing_tags_nothing(make_training):
    model, _ = make_training(mtp_num_layers=None)
    assert functional.tag([model]) == []


def test_a_decision_needs_no_megatron_configuration():
    from megatron_overrides.norms.values import GradNorms

    norms = GradNorms({None: 2.0, "mtp": 0.5}, {None: 2.0, "mtp": 0.5})
    assert not functional.decide(norms, SimpleNamespace(clip_grad=1.0)).skips_update
    assert functional.decide(norms, SimpleNamespace(grad_norm_skip_threshold=1.0)).skips_update
    decision = functional.decide(norms, SimpleNamespace(mtp_grad_norm_skip_threshold=0.1))
    assert (decision.skips_update, decision.skips_mtp) == (False, True)
