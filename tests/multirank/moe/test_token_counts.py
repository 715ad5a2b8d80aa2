"""The tokens of MTP heads are counted over the ranks that share a microbatch: losses, collectives and the log.

That gradients are those of the whole sequences is in test_losses.py.
"""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_token_prediction as mtp

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-mtp-tokens-over-ranks"), pytest.mark.ranks(2)]

DEPTHS, LENGTH = 2, 16
# Which positions of each microbatch of a step count: all, a few, those of one of four ranks, those at the end, none.
MASKS = torch.zeros(4, LENGTH, dtype=torch.float64)
MASKS[0] = 1
MASKS[1, 3:6] = 1
MASKS[2, [0, 1, LENGTH - 2, LENGTH - 1]] = 1
LABELS = torch.arange(4 * LENGTH).view(4, LENGTH)


@pytest.fixture
def run():
    """run(mask, labels, config settings, ...): the loss of each head on this rank; that of a position is its label."""

    def process(mask=None, labels=LABELS[:1], is_training=True, cp_group=None, **settings):
        config = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=DEPTHS, **settings
        )
        length = labels.size(1)
        hidden = torch.ones((1 + DEPTHS) * length, 1, 4, requires_grad=torch.is_grad_enabled())
        losses = []

        def attach(main, loss):
            losses.append(loss.detach().double().sum())
            return main

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mtp.MTPLossAutoScaler, "apply", attach)
            mtp.process_mtp_loss(
                hidden,
                labels,
                torch.ones(1, length) if mask is None else mask.float(),
                lambda head, weight, runtime_gather_output: (head, None),
                None,
                True,
                is_training,
                lambda labels, logits: labels.float(),
                config,
                cp_group=cp_group,
            )
        return torch.stack(losses)

    return process


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean", "per token"])
def test_the_loss_of_a_step_depends_on_neither_replicas_nor_context_parallel_ranks(
    parallel, run, world_size, is_per_token, count_collectives
):
    """The reference is the mean of each microbatch in float64, over the whole sequence."""
    settings = {"calculate_per_token_loss": is_per_token, "mtp_loss_scaling_factor": float(DEPTHS)}
    counted = [MASKS[:, depth:] for depth in range(1, 1 + DEPTHS)]
    sums = [(LABELS[:, depth:] * mask).sum(1) for depth, mask in enumerate(counted, start=1)]
    means = torch.stack([total / mask.sum(1).clamp(min=1) for total, mask in zip(sums, counted, strict=True)])
    tokens = MASKS.sum(1)
    expected = (means * tokens).sum(1) / tokens.sum() if is_per_token else means.mean(1)
    for size in (size for size in (1, 2, 4) if size <= world_size):
        parallel(context_parallel_size=size)
        group = parallel_state.get_context_parallel_group()
        chunks = torch.arange(LENGTH).view(2 * size, -1)
        mine = chunks[[group.rank(), 2 * size - 1 - group.rank()]].flatten()
        numbers = range(parallel_state.get_data_parallel_rank(), len(MASKS), world_size // size)
        mtp.MTPLossLoggingHelper.tracker = {}
        count_collectives.clear()
        loss = sum(run(MASKS[[n]][:, mine], LABELS[[n]][:, mine], cp_group=group, **settings) for n in numbers)
        assert count_collectives.count("all_reduce") == (len(numbers) if size > 1 else 0)
        torch.distributed.all_reduce(loss)
        # finalize_model_grads divides by all tokens; or the schedule by the microbatches, and DDP averages.
        divisor = tokens.sum() if is_per_token else len(numbers) * world_size
        torch.testing.assert_close(loss / divisor, expected)
        logged = {}
        mtp.MTPLossLoggingHelper.track_mtp_metrics(1 / len(numbers), 1, None, total_loss_dict=logged)
        torch.testing.assert_close([logged[f"mtp_{depth} loss"].double() for depth in (1, 2)], list(means.mean(1)))


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


def test_sequences_that_are_dealt_to_separate_groups_of_ranks_are_refused():
    settings = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "hybrid_context_parallel": True}
    settings["max_seqlen_per_dp_cp_rank"] = 64
    TransformerConfig(**settings)
    with pytest.raises(ValueError, match="-count-mtp-tokens-over-ranks"):
        TransformerConfig(mtp_num_layers=1, **settings)
