"""Losses that compare the heads with the main model: identities, chunks, settings.

tests/multirank/mtp/test_losses.py has their numbers.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_overrides.mtp.losses.position_weights import dpace_weights
from tests.oracles.losses.conditions import LAYOUTS, LOSSES, Condition, Layout
from tests.oracles.losses.packs import Pack
from tests.oracles.losses.reference import make_problem
from tests.trainings.random_optimizers import examples

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-for-acceptance", "chunk-mtp-logits")]

ONE_RANK = LAYOUTS[0]


def compute(condition, chunk_size=1024, depth_weights=None):
    """The loss and the gradients of heads and output weight."""
    from tests.trainings.mtp_losses import compute

    problem = make_problem(condition)._replace(depth_weights=depth_weights)
    return compute(condition, problem, list(range(condition.layout.pack.size)), chunk_size)


def assert_close(actual, expected, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@examples(25)
@given(
    loss_type=st.sampled_from(list(LOSSES)),
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=4),
    chunk_size=st.integers(1, 40),
    is_detached=st.booleans(),
)
def test_the_result_does_not_depend_on_the_chunk_size_but_for_rounding(loss_type, sequences, chunk_size, is_detached):
    pack = Pack(tuple((tokens, tokens + padding) for tokens, padding in sequences), tail=1)
    layout = Layout("random", pack, batch=1, is_packed=True)
    condition = Condition(layout, loss_type, is_tied=True, is_detached=is_detached)
    whole = compute(condition, chunk_size=10**6)
    assert_close(compute(condition, chunk_size), whole, 3e-6)


@pytest.mark.parametrize("is_detached", [True, False])
def test_chunked_cross_entropy_is_that_of_whole_logits(is_detached):
    condition = Condition(ONE_RANK, "cross_entropy", is_tied=False, is_detached=is_detached)
    assert_close(compute(condition, 10), compute(condition, 0), 1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_equal_depth_weights_are_none(loss_type):
    condition = Condition(ONE_RANK, loss_type, is_tied=True, is_detached=True)
    for weighed, plain in zip(compute(condition, depth_weights="2,2,2"), compute(condition), strict=True):
        assert torch.equal(weighed, plain)
    assert not torch.equal(compute(condition, depth_weights="2,2,1")[1], compute(condition)[1])


def test_bfloat16_is_as_near_as_its_logits():
    """Logits of bfloat16 have eight bits; probabilities and sums are float32."""
    from tests.trainings.mtp_losses import difference

    for loss_type in LOSSES:
        actual = difference(Condition(ONE_RANK, loss_type, is_tied=True, is_detached=False, dtype="bfloat16"))
        assert actual.loss < 5e-3 and actual.gradient < 3e-2


def test_the_weights_of_dpace_are_those_of_the_paper():
    """arXiv 2605.18810: confidences (7), suffix sums of their prefix products (8)."""
    losses = -torch.tensor([0.8, 0.5]).view(2, 1, 1).log()
    counts = torch.ones(2, 1, 1, dtype=torch.bool)
    weights = dpace_weights(losses, counts, 0.5).flatten().tolist()
    assert weights == pytest.approx([0.9 + 0.9 * 0.75, 0.9 * 0.75])
    assert dpace_weights(losses, counts, 1.0).flatten().tolist() == [2, 1]
    # Without the first position the second is the first of its draft, and the other way round.
    for alone, expected in (([False, True], 0.75), ([True, False], 0.9)):
        weights = dpace_weights(losses, torch.tensor(alone).view(2, 1, 1), 0.5)[alone]
        assert weights.flatten().tolist() == pytest.approx([expected])


def test_a_head_alone_is_weighed_by_its_confidence(make_model, batch, gradients):
    """So its weights are not constant, and smaller than 1."""
    more = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0, "mtp_detach_heads": True}
    dpace, plain = (
        gradients(model, model(**batch), weight=0.0)
        for model in (make_model(**more, mtp_position_weights="dpace", mtp_dpace_alpha=alpha) for alpha in (0.5, 1.0))
    )
    unweighed = make_model(**more)
    expected = gradients(unweighed, unweighed(**batch), weight=0.0)
    assert all(torch.equal(plain[name], gradient) for name, gradient in expected.items())
    name = "mtp.layers.0.eh_proj.weight"
    assert 0.4 < (dpace[name].norm() / expected[name].norm()).item() < 0.7


def test_the_logged_losses_of_weighed_positions_are_without_weights(make_model, batch):
    logged = []
    for weights in ("equal", "dpace"):
        MTPLossLoggingHelper.tracker = {}
        make_model(mtp_position_weights=weights)(**batch)
        logged.append(MTPLossLoggingHelper.tracker["loss_values"].clone())
    assert torch.equal(*logged) and logged[0].all()


def distance(actual, expected):
    """Norm of the difference over norm, of all gradients together."""
    assert actual.keys() == expected.keys()
    wanted = torch.cat([gradient.flatten() for gradient in expected.values()])
    return ((torch.cat([actual[name].flatten() for name in expected]) - wanted).norm() / wanted.norm()).item()


def with_loss(make_model, loss_type, **more):
    return make_model(mtp_loss_type=loss_type, mtp_loss_scaling_factor=1.0, **more)


@pytest.mark.parametrize("loss_type", ["kl", "tv", "e2e_tv"])
def test_a_detached_head_trains_nothing_but_itself(make_model, batch, gradients, loss_type):
    model = with_loss(make_model, loss_type, mtp_detach_heads=True)
    for name, gradient in gradients(model, model(**batch), weight=0.0).items():
        assert bool(gradient.any()) == name.startswith("mtp."), name


@pytest.mark.parametrize("loss_type, is_detached, is_per_token", [("kl", True, False), ("e2e_tv", False, True)])
def test_recomputed_layers_have_the_same_gradients(make_model, batch, gradients, loss_type, is_detached, is_per_token):
    fields = {"mtp_detach_heads": is_detached, "calculate_per_token_loss": is_per_token}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, other = (with_loss(make_model, loss_type, **fields, **more) for more in ({}, recompute))
    expected, actual = (gradients(model, model(**batch), weight=0.0) for model in (plain, other))
    assert distance(actual, expected) < 1e-5


@pytest.mark.parametrize("is_detached", [True, False])
def test_fused_cross_entropy_in_chunks_is_that_of_whole_logits(make_model, batch, gradients, is_detached):
    fields = {"cross_entropy_loss_fusion": True, "mtp_detach_heads": is_detached}
    plain, chunked = (make_model(**fields, mtp_logits_chunk_size=size) for size in (0, 7))
    expected, actual = (gradients(model, model(**batch), weight=0.0) for model in (plain, chunked))
    assert 0 < distance(actual, expected) < 5e-3  # Megatron's fused cross entropy rounds the gradient to bfloat16


@pytest.mark.parametrize("loss_type, is_detached", [("kl", False), ("e2e_tv", True)])
def test_under_the_overlap_of_experts_the_losses_are_the_same(
    make_model, batch, gradients, overlapped_gradients, experts, loss_type, is_detached
):
    model = with_loss(make_model, loss_type, mtp_detach_heads=is_detached, **experts).bfloat16()
    expected = gradients(model, model(**batch), weight=0.0)
    assert expected["mtp.layers.0.eh_proj.weight"].any()
    got = overlapped_gradients(model, batch)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items() if gradient.any())


@pytest.mark.parametrize("is_detached", [True, False])
def test_each_row_is_projected_once_for_the_main_model_and_once_for_each_head(
    make_model, batch, gradients, is_detached
):
    """Attached heads are projected once more in backward, with the main model's rows."""
    model = with_loss(make_model, "e2e_tv", mtp_detach_heads=is_detached, mtp_logits_chunk_size=1024)
    rows = []
    model.output_layer.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].size(0)))
    output = model(**batch)
    length, depths = 12, 2
    # The rows after the last position stand for those of the next context-parallel rank.
    assert sum(rows) == length + (length + depths) + depths * length
    rows.clear()
    output.mean().backward()
    assert sum(rows) == (0 if is_detached else (length + depths) + depths * length)


def test_no_more_rows_of_logits_than_the_chunk_size_exist_at_a_time(make_model, batch):
    sizes = {}
    for is_detached in (True, False):
        model = with_loss(make_model, "tv", mtp_detach_heads=is_detached, mtp_logits_chunk_size=12)
        rows = sizes[is_detached] = []
        model.output_layer.register_forward_hook(lambda _, inputs, __, rows=rows: rows.append(inputs[0].size(0)))
        model(**batch)
    assert set(sizes[True][:-1]) == {3, 5}  # 12 rows / (2 samples x (main model + 1 head)), and 2 rows ahead
    assert set(sizes[False][:-1]) == {2, 4}  # with 2 heads


def test_with_cross_entropy_nothing_is_projected_for_a_length_that_is_not_due(make_model, batch):
    model = make_model(mtp_acceptance_length_interval=2)
    calls = []
    model.output_layer.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for iteration in range(4):
        calls.clear()
        model(**batch)
        counts.append(len(calls))
        MTPLossLoggingHelper.track_mtp_metrics(1.0, iteration, None)
    assert counts == [6, 3, 6, 3]  # the main model and two heads; then a chunk of the main model and of each head


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mtp_loss_type": "any"}, "mtp_loss_type. must be one of cross_entropy, kl, tv, lk, e2e_tv, not 'any'"),
        ({"mtp_loss_type": "tv", "mtp_num_layers": None}, "mtp_loss_type. tv requires MTP heads: add --mtp-num-layers"),
        ({"mtp_position_weights": "d-pace"}, "mtp_position_weights. must be one of equal, dpace, not 'd-pace'"),
        ({"mtp_position_weights": "dpace", "mtp_num_layers": None}, "mtp_position_weights. dpace requires MTP heads"),
        (
            {"mtp_position_weights": "dpace", "mtp_loss_type": "lk"},
            "but --mtp-loss-type .TransformerConfig.mtp_loss_type. is lk: leave one of the two out",
        ),
        ({"mtp_position_weights": "dpace", "mtp_dpace_alpha": 0.0}, "alpha. 0.0: give a number above 0, up to 1"),
        ({"mtp_position_weights": "dpace", "mtp_dpace_alpha": 1.1}, "alpha. 1.1: give a number above 0, up to 1"),
        ({"mtp_position_weights": "dpace", "mtp_dpace_alpha": float("nan")}, "give a number above 0, up to 1"),
        ({"mtp_position_weights": "dpace", "mtp_dpace_alpha": "0.5"}, "'0.5': give a number above 0, up to 1"),
        ({"mtp_dpace_alpha": 0.3}, "0.3 has no effect without --mtp-position-weights .*dpace: add that, or leave it"),
        ({"mtp_depth_weights": "1,2,3"}, "--mtp-depth-weights .* 1,2,3: give one weight for each of the 2 MTP layers"),
        ({"mtp_depth_weights": "1,x"}, "give one weight for each of the 2"),
        ({"mtp_depth_weights": (0, 0)}, "not all 0"),
        ({"mtp_depth_weights": "1,-1"}, "not negative"),
        ({"mtp_depth_weights": "1,nan"}, "give one weight for each of the 2"),
        ({"mtp_logits_chunk_size": -1}, "--mtp-logits-chunk-size .* -1: give a number of rows"),
        ({"mtp_acceptance_length_interval": -1}, "--mtp-acceptance-length-interval .* -1: give a number of steps"),
        (
            {"mtp_loss_type": "tv", "defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2,
             "gradient_accumulation_fusion": True, "pipeline_dtype": torch.float32},
            "--defer-embedding-wgrad-compute .* keeps the input of each of its calls",
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, message):
    from megatron.core.transformer import TransformerConfig

    fields = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 1, "mtp_num_layers": 2, **settings}
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**fields)
