"""The heads in passes without gradients where the caller asks for them, and not at all where he says so."""

import megatron_mtp_patches
import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_mtp_patches import mtp_pass

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("mtp-acceptance-length")]


@pytest.fixture
def expected_lengths():
    """expected_lengths(model, batch): both accepted lengths, from the logits of whole sequences, in float64."""

    def expected(model, batch):
        seen = []
        handle = model.output_layer.register_forward_hook(lambda _, given, __: seen.append(given[0]))
        model(**batch)  # cross entropy: each head, then the main model
        handle.remove()
        MTPLossLoggingHelper.tracker = {}
        *heads, main = (torch.nn.functional.linear(hidden, model.output_layer.weight).double() for hidden in seen)
        accepted = agreed = torch.ones(batch["labels"].t().shape, dtype=torch.float64)
        lengths, mask = torch.ones(2, *accepted.shape, dtype=torch.float64), batch["loss_mask"].t().double()
        counts = torch.ones_like(mask)
        for logits in heads:
            main, mask = (torch.cat([each[1:], torch.zeros_like(each[:1])]) for each in (main, mask))
            counts = counts * mask
            accepted = accepted * torch.minimum(main.softmax(-1), logits.softmax(-1)).sum(-1)
            agreed = agreed * (main.argmax(-1) == logits.argmax(-1))
            lengths = lengths + torch.stack([accepted, agreed])
        return [(length * counts).sum().item() / counts.sum().item() for length in lengths]

    return expected


@pytest.mark.parametrize("loss_type", ["cross_entropy", "tv", "e2e_tv"])
def test_lengths_are_means_of_the_products_over_complete_chains(make_model, batch, expected_lengths, loss_type):
    expected = expected_lengths(make_model(), batch)
    model = make_model(mtp_loss_type=loss_type).eval()
    with torch.no_grad(), mtp_pass(compute=True) as metrics:
        model(**batch)
    actual = metrics.reduce()
    assert all(type(value) is float for value in actual.values())
    lengths = [actual["mtp acceptance length"], actual["mtp greedy acceptance length"]]
    assert lengths == pytest.approx(expected, rel=1e-6)
    assert MTPLossLoggingHelper.tracker == {}


def test_the_log_has_the_lengths_of_the_steps_that_are_due(make_model, batch, expected_lengths):
    expected = expected_lengths(make_model(), batch)
    model = make_model(mtp_acceptance_length_interval=2)
    seen = []

    class Writer:
        def add_scalar(self, name, value, iteration):
            seen.append((iteration, name, float(value)))

    for iteration in range(3):
        for _ in range(2):
            model(**batch)
        MTPLossLoggingHelper.track_mtp_metrics(0.5, iteration, Writer())
    for name, value in zip(("mtp_acceptance_length", "mtp_greedy_acceptance_length"), expected, strict=True):
        actual = [(iteration, length) for iteration, tag, length in seen if tag == name]
        assert actual == [(0, pytest.approx(value)), (2, pytest.approx(value))]
    from megatron_overrides.report.metrics import training_metrics

    texts = "".join(metric.text for metric in training_metrics())
    assert f" mtp acceptance length: {expected[0]:.3f} | mtp greedy acceptance length: {expected[1]:.3f} |" in texts


def test_losses_are_those_of_training_and_means_over_microbatches(make_model, batch):
    model = make_model()
    with torch.no_grad(), mtp_pass(compute=True) as metrics:
        for _ in range(3):
            model(**batch)
    actual = metrics.reduce()
    model(**batch)
    losses = MTPLossLoggingHelper.tracker["loss_values"]
    assert [actual["mtp_1 loss"], actual["mtp_2 loss"]] == pytest.approx(losses.tolist(), rel=1e-6)
    counts = [MTPLossLoggingHelper.tracker[key] for key in ("correct_values", "total_values")]
    assert actual["mtp_1 acceptance %"] == pytest.approx(100 * (counts[0] / counts[1])[0].item(), rel=1e-6)


def test_the_output_of_the_main_model_is_the_same(make_model, batch):
    model = make_model(mtp_loss_type="kl").eval()
    with torch.no_grad():
        expected = model(**batch)
        with mtp_pass(compute=True):
            assert torch.equal(model(**batch), expected)


def test_heads_that_are_not_wanted_do_not_run_where_there_are_gradients(make_model, batch, gradients):
    model = make_model()
    with mtp_pass(compute=False) as metrics:
        actual = gradients(model, model(**batch))
    assert metrics.reduce() == {} and MTPLossLoggingHelper.tracker == {}
    assert actual and not any(name.startswith("mtp.") for name in actual)


def test_passes_with_gradients_stay_in_the_log_of_training(make_model, batch, gradients):
    model = make_model()
    expected = gradients(model, model(**batch))
    with mtp_pass(compute=True) as metrics:
        actual = gradients(model, model(**batch))
    assert metrics.reduce() == {}
    assert all(torch.equal(gradient, expected[name]) for name, gradient in actual.items())


@pytest.fixture
def other_targets(batch):
    """Labels and a mask that the model is not given."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint_like(batch["labels"], 1, 30, generator=generator)
    return {"labels": labels, "loss_mask": (torch.rand(labels.shape, generator=generator) > 0.5).float()}


@pytest.mark.parametrize(
    "in_model", [{"labels": None, "loss_mask": None}, {}], ids=["the model has none", "it has others"]
)
def test_labels_and_mask_are_those_of_the_heads_alone(make_model, batch, gradients, other_targets, in_model):
    """An RL trainer computes its own loss from logits, and trains the heads on responses."""
    model = make_model(mtp_detach_heads=True)
    expected = gradients(model, model(**batch | other_targets))
    losses = MTPLossLoggingHelper.tracker["loss_values"].clone()
    MTPLossLoggingHelper.tracker = {}
    output = model(**batch | in_model)
    MTPLossLoggingHelper.tracker = {}
    with mtp_pass(compute=True, **other_targets):
        again = model(**batch | in_model)
    assert torch.equal(again, output)
    actual = gradients(model, again)
    heads = [name for name in expected if name.startswith("mtp.")]
    assert heads and all(torch.equal(actual[name], expected[name]) for name in heads)
    assert torch.equal(MTPLossLoggingHelper.tracker["loss_values"], losses)


def test_labels_of_another_shape_are_refused(make_model, batch, other_targets):
    short = {name: value[:, :-1] for name, value in other_targets.items()}
    with (
        mtp_pass(compute=True, **short),
        pytest.raises(ValueError, match=r"mtp_pass\(labels=...\) has the shape \[2, 11\]"),
    ):
        make_model()(**batch)


def test_an_inner_pass_ends_where_it_ends(make_model, batch):
    model = make_model().eval()
    with torch.no_grad(), mtp_pass(compute=True) as outer:
        with mtp_pass(compute=False) as inner:
            model(**batch)
        assert inner.reduce() == {} and outer.reduce() == {}
        model(**batch)
    assert outer.reduce()


def test_without_its_patch_it_says_what_it_needs():
    try:
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply("-mtp-acceptance-length")
        with pytest.raises(megatron_mtp_patches.PatchError, match="needs the patch mtp-acceptance-length, .* disabled"):
            mtp_pass(compute=True)
    finally:
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply()
