"""global_aux_loss takes the share of each expert in all tokens that were counted; parts of replicas are added up."""

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("sum-global-aux-loss-over-replicas", "count-tokens-of-all-microbatches"),
    pytest.mark.ranks(2),
]
EXPERTS, TOP, WEIGHT = 4, 2, 0.5


@pytest.fixture
def losses(parallel, rank):
    """losses(lengths, is_masked): global_aux_loss in microbatches of so many tokens.

    (this rank's part, what is logged of it, the part in float64), each for all microbatches.
    """

    def run(lengths, is_masked, tensor_parallel=1, **settings):
        parallel(tensor_model_parallel_size=tensor_parallel)
        settings |= {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": WEIGHT}
        config = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=TOP, **settings
        )
        router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
        seen, logged, expected, counted = [], [], [], torch.zeros(EXPERTS, dtype=torch.float64)

        def attach(probs, coeff, loss, *_, **__):
            seen.append(float(loss))
            logged.append(float(loss) / coeff)  # as on all releases

        router.attach_and_log_load_balancing_loss = attach
        torch.manual_seed(rank)
        for length in lengths:
            scores = torch.rand(max(lengths) if is_masked else length, EXPERTS)
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOP).indices, 1.0).bool()
            scores[length:], chosen[length:] = 0.0, False
            router._apply_global_aux_loss(scores, scores, chosen, with_padding_mask=is_masked)
            sums = torch.stack([chosen.sum(0), torch.full((EXPERTS,), length)]).double()
            torch.distributed.all_reduce(sums)
            counted += sums[0]
            share = counted / counted.sum()
            expected.append(EXPERTS * WEIGHT * float((scores.double().sum(0) / sums[1] * share).sum()))
        return seen, logged, expected

    return run


@pytest.mark.parametrize("is_masked", [False, True])
def test_short_microbatches_weigh_experts_by_all_tokens(losses, is_masked):
    seen, _, expected = losses([8, 2, 5], is_masked)
    assert seen == pytest.approx(expected, rel=1e-5)


def test_ranks_may_have_different_padding(losses, rank):
    seen, _, expected = losses([8, 2 + rank, 5 - rank], True)
    assert seen == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_on, factor", [(False, 1), (True, 2)])
def test_the_setting_makes_up_for_the_mean_over_two_replicas(losses, world_size, is_on, factor):
    setting = {"moe_global_aux_loss_over_data_parallel": is_on}
    seen, logged, expected = losses([8, 2, 5], True, world_size // 2, **setting)
    assert seen == pytest.approx([factor * one for one in expected], rel=1e-5)
    assert logged == pytest.approx([one / WEIGHT for one in expected], rel=1e-5)
