"""The losses of the heads: labels (given or derived), masks and weights."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss, roll_tensor

from megatron_overrides.mtp.losses import process_mtp_loss as override

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("derive-mtp-labels")]

LENGTH = 8


@pytest.fixture
def run(monkeypatch):
    """run(**arguments): the targets of each head, and the weight of each position in its loss."""

    def process(depths=2, per_token=False, is_detached=False, **arguments):
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=depths)
        config.calculate_per_token_loss, config.mtp_loss_scaling_factor = per_token, 0.5
        config.mtp_detach_heads = is_detached
        targets, weights = [], []

        def compute_loss(labels, logits):
            targets.append(labels.tolist())
            return torch.full(labels.shape, 2.0)

        def attach(hidden, loss):
            weights.append(loss)
            return hidden

        monkeypatch.setattr(MTPLossAutoScaler, "apply", attach)
        hidden = torch.arange((1 + depths) * LENGTH * 4.0).view(-1, 1, 4).requires_grad_(True)
        main = process_mtp_loss(
            **{
                "hidden_states": hidden,
                "labels": None,
                "loss_mask": None,
                "output_layer": lambda head, weight, runtime_gather_output: (head, None),
                "output_weight": None,
                "runtime_gather_output": True,
                "is_training": False,
                "compute_language_model_loss": compute_loss,
                "config": config,
                **arguments,
            }
        )
        assert torch.equal(main, hidden[:LENGTH])
        return targets, weights

    return process


TOKENS = torch.arange(1, LENGTH + 1).unsqueeze(0)


def test_head_k_predicts_the_token_k_plus_1_further(run):
    from_tokens, weights = run(input_ids=TOKENS)
    assert from_tokens == [[[3, 4, 5, 6, 7, 8, 0, 0]], [[4, 5, 6, 7, 8, 0, 0, 0]]]
    assert [weight.count_nonzero().item() for weight in weights] == [6, 5]
    from_labels, _ = run(labels=TOKENS.roll(-1, 1))
    assert from_labels[0][0][:6] == from_tokens[0][0][:6]  # the rest holds the last label, which only a data set knows


def test_labels_that_are_given_are_not_derived(run):
    assert run(labels=TOKENS + 10, input_ids=TOKENS)[0][0] == [[12, 13, 14, 15, 16, 17, 18, 0]]


def test_the_mask_of_the_tokens_moves_with_them(run):
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1.0]])  # the response of a policy: tokens 4, 5, 7 and 8
    targets, weights = run(input_ids=TOKENS, loss_mask=mask)
    for target, weight in zip(targets, weights, strict=True):
        counted = [token for token, one in zip(target[0], weight[0].tolist(), strict=True) if one]
        assert counted == [token for token in (4, 5, 7, 8) if token in target[0]]


def test_labels_stay_within_their_packed_sequence(run):
    ends = torch.tensor([0, 3, LENGTH])
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    targets, weights = run(input_ids=TOKENS, packed_seq_params=packed)
    assert targets == [[[3, 0, 0, 6, 7, 8, 0, 0]], [[0, 0, 0, 7, 8, 0, 0, 0]]]
    for target, weight in zip(targets, weights, strict=True):
        assert (weight[0] > 0).tolist() == [bool(token) for token in target[0]]


@pytest.mark.parametrize("arguments", [{}, {"input_ids": None}])
def test_without_labels_and_tokens_there_is_no_loss(run, arguments):
    assert run(**arguments) == ([], [])


def test_the_loss_is_a_mean_over_the_tokens_that_a_head_predicts(run):
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1.0]])
    _, weights = run(labels=TOKENS, loss_mask=mask)
    for weight, tokens in zip(weights, (6, 5), strict=True):
        assert weight.sum().item() == pytest.approx(2.0 * 0.5 / 2)  # loss 2, factor 0.5, two heads
        assert weight.max().item() == pytest.approx(2.0 * 0.5 / 2 / tokens)


def test_a_loss_per_token_is_weighed_as_the_main_models(run):
    _, weights = run(labels=TOKENS, per_token=True)
    for weight, tokens in zip(weights, (7, 6), strict=True):
        assert weight.max().item() == pytest.approx(2.0 * 0.5 / 2 * LENGTH / tokens)
    _, unscaled = run(labels=TOKENS, per_token=True, rescale_per_token=False)  # 0.16
    assert all(weight.max().item() == 2.0 * 0.5 / 2 for weight in unscaled)


def test_labels_without_a_mask_are_warned_about_once(run, caplog):
    override._warn_of_missing_mask.cache_clear()
    run(labels=TOKENS, loss_mask=torch.ones_like(TOKENS), is_training=True)
    run(input_ids=TOKENS, is_training=True, is_detached=True, output_weight=TOKENS)
    run(labels=TOKENS, is_training=False)
    assert not caplog.records
    for _ in range(2):
        run(labels=TOKENS, is_training=True)
    (record,) = caplog.records
    assert "labels and no loss_mask, so the MTP heads train on every position" in record.getMessage()


def test_derived_labels_that_train_the_main_model_are_warned_about_once(run, caplog):
    override._warn_of_derived_labels.cache_clear()
    run(input_ids=TOKENS, is_detached=True, output_weight=TOKENS)
    with torch.no_grad():
        run(input_ids=TOKENS)
    run(labels=TOKENS)
    assert not caplog.records
    for _ in range(2):
        run(input_ids=TOKENS)
    (record,) = caplog.records
    assert "derive theirs from the tokens, and their loss trains the main model as well" in record.getMessage()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_rank_warns_because_the_first_stage_has_no_heads(run, monkeypatch, caplog, rank):
    override._warn_of_derived_labels.cache_clear()
    for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *group, value=value: value)
    run(input_ids=TOKENS)
    assert bool(caplog.records) is (rank == 1)


def test_a_mask_without_any_token_gives_no_nan(run):
    _, weights = run(labels=TOKENS, loss_mask=torch.zeros(1, LENGTH))
    assert all(torch.equal(weight, torch.zeros(1, LENGTH)) for weight in weights)


def test_roll_tensor_accepts_none():
    assert roll_tensor(None) == (None, None)
    assert roll_tensor(tensor=None, shifts=-1) == (None, None)


def test_arguments_whose_order_differs_between_releases_are_keyword_only(run):
    with pytest.raises(TypeError, match="positional"):
        process_mtp_loss(*[None] * 12)
