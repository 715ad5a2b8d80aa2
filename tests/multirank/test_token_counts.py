"""The tokens of MTP heads are counted over all ranks that share their mean: groups, collectives and the log.

That values and gradients are those of the whole sequences is in test_losses.py.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_token_prediction as mtp

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2, 4)]

DEPTHS, LENGTH, VOCABULARY = 2, 8, 11
# Of a layout: process groups, whether the loss is per token, and how many ranks share a mean.
LAYOUTS = {
    "mean, CP": ({"context_parallel_size": 2}, False, 2),
    "mean, DP": ({}, False, 1),
    "per token, CP": ({"context_parallel_size": 2}, True, None),
    "per token, DP": ({}, True, None),
}


@pytest.fixture
def run(rank):
    """run(config settings, ...): the loss of each head on this rank; without `mask` only rank 0 has tokens."""

    def process(is_training=True, mask=None, cp_group=None, loss=3.0, **settings):
        config = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=DEPTHS, **settings
        )
        mtp.MTPLossLoggingHelper.tracker = {}
        hidden = torch.ones((1 + DEPTHS) * LENGTH, 1, 4, requires_grad=torch.is_grad_enabled())
        losses = []

        def attach(main, loss):
            losses.append(loss.detach())
            return main

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mtp.MTPLossAutoScaler, "apply", attach)
            mtp.process_mtp_loss(
                hidden,
                torch.ones(1, LENGTH, dtype=torch.int64),
                torch.full((1, LENGTH), float(rank == 0)) if mask is None else mask,
                lambda head, weight, runtime_gather_output: (head, None),
                None,
                True,
                is_training,
                lambda labels, logits: torch.full(labels.shape, loss),
                config,
                cp_group=cp_group,
            )
        return losses

    return process


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_all_reduce_counts_the_tokens_of_all_heads_and_the_mean_is_logged(
    parallel, run, layout, rank, world_size, count_collectives
):
    sizes, is_per_token, sharing = LAYOUTS[layout]
    sharing = world_size if sharing is None else sharing
    parallel(**sizes)
    ones = torch.ones(1, LENGTH)
    count_collectives.clear()
    run(
        mask=ones * (rank == 0),
        cp_group=parallel_state.get_context_parallel_group(),
        calculate_per_token_loss=is_per_token,
    )
    assert count_collectives.count("all_reduce") == int(sharing > 1)
    logged = mtp.MTPLossLoggingHelper.tracker
    mtp.MTPLossLoggingHelper.reduce_metrics_in_tracker()
    # Each mean has the loss 3, or no token: then it is 0.
    means_with_tokens = 1 if is_per_token or sizes else 1 / world_size
    if sizes and not is_per_token:
        means_with_tokens = 2 / world_size
    torch.testing.assert_close(logged["loss_values"], torch.full((DEPTHS,), 3.0 * means_with_tokens))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["all ranks", "each rank"])
def test_the_mean_over_two_ranks_with_2_and_4_tokens(parallel, run, rank, by, monkeypatch):
    """A case like that of NVIDIA/Megatron-LM#7452: the mean is 4, and counts of each rank, as upstream's, give 14/3."""
    parallel()
    if by == "each rank":
        monkeypatch.delattr(mtp, "sum_token_counts")
    tokens, loss = (2, 10.0) if rank == 0 else (4, 2.0)
    mask = (torch.arange(LENGTH) < tokens).float().unsqueeze(0)
    first_head, _ = run(mask=mask, loss=loss, calculate_per_token_loss=True, mtp_loss_scaling_factor=float(DEPTHS))
    total = first_head.sum()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total / 6, torch.tensor(4.0 if by == "all ranks" else 14 / 3))


def test_without_gradients_and_in_evaluation_ranks_count_by_themselves(parallel, run, count_collectives):
    parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    with torch.no_grad():
        count_collectives.clear()
        run(is_training=False, cp_group=group)
    assert "all_reduce" not in count_collectives


def test_a_position_that_is_weighed_counts_once_and_e2e_tv_counts_its_chains_once(parallel, run, monkeypatch):
    parallel(context_parallel_size=2)
    reduced = []
    original = torch.distributed.all_reduce
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda tensor, *args, **kwargs: (reduced.append(tensor.numel()), original(tensor, *args, **kwargs))[1],
    )
    group = parallel_state.get_context_parallel_group()
    for numbers, settings in (
        (1 + DEPTHS, {}),
        (1 + DEPTHS, {"mtp_position_weights": "dpace"}),
        (2, {"mtp_loss_type": "e2e_tv"}),
    ):
        reduced.clear()
        run(cp_group=group, is_training=False, **settings)
        assert reduced == [numbers]


def test_the_groups_of_the_model_take_the_place_of_the_global_ones(parallel):
    from megatron_overrides.mtp.losses.token_counts import mean_group

    parallel()
    per_token, mean = (SimpleNamespace(calculate_per_token_loss=value) for value in (True, False))
    groups = SimpleNamespace(dp_cp="data and context", dp_cp_gtp_remat=None)
    assert mean_group(mean, "context", groups) == "context"
    assert mean_group(per_token, "context", groups) == "data and context"
    # finalize_model_grads of 0.19 counts over the wider group, if there is one.
    groups.dp_cp_gtp_remat = "wider"
    assert mean_group(per_token, "context", groups) == "wider"
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert mean_group(per_token, None, None) is whole


def test_ranks_with_different_numbers_of_microbatches_are_refused():
    settings = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "hybrid_context_parallel": True}
    settings["max_seqlen_per_dp_cp_rank"] = 64
    TransformerConfig(**settings)
    with pytest.raises(ValueError, match="-count-mtp-tokens-over-ranks"):
        TransformerConfig(mtp_num_layers=1, **settings)
