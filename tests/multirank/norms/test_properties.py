"""Random optimizers whose parameters are dealt to ranks at random, against plain torch on whole vectors.

Every rank draws the same examples, and judges what all ranks have seen: so they fail, and look for less, together.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.reference_norms import about, assert_close
from tests.trainings.random_optimizers import STEPS, Built, cases, examples

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("skip-update-on-large-grad-norm", "clip-mtp-grads-separately", "clip-named-groups-separately"),
    pytest.mark.ranks(2),
]


@pytest.fixture(scope="module")
def half(parallel):
    """The ranks of this rank's half of the world. Megatron's model-parallel group is the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel(tensor_model_parallel_size=world)
    halves = [dist.new_group(list(part)) for part in torch.arange(world).view(2, -1).tolist()]
    yield halves[rank // (world // 2)]
    for group in halves:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.fixture
def take(half, count_collectives, rank, world_size):
    """take(case): for each step what this rank returned and reports, its reductions, and whether its shards are right.

    The last is a sentence where they are not. Nothing is raised: the other ranks would wait.
    """
    from megatron.core import parallel_state

    def take(case):
        built = Built(case, rank, world_size, everybody=parallel_state.get_model_parallel_group(), half=half)
        for step in range(STEPS):
            expected = built.reference_step(step)
            count_collectives.clear()
            result = (*built.optimizer.step(), built.optimizer.grad_norms_by_group)
            called = list(count_collectives)
            result = (*result, built.optimizer.has_grad_norm_group("mtp"))
            yield expected, result, called, wrong_shards(built, expected)

    def wrong_shards(built, expected):
        try:
            assert_close(built.updated_with(), built.shards_of(expected.used))
        except AssertionError as error:
            return str(error)

    return take


@pytest.mark.ranks(2, 4)
@examples(50)
@given(data=st.data())
def test_ranks_take_the_reference_step_together(data, take, from_all_ranks, world_size):
    case = data.draw(cases(world_size))
    assert len(set(from_all_ranks(repr(case)))) == 1
    for expected, result, collectives, wrong in take(case):
        everyones = from_all_ranks((result, collectives, wrong))
        norms = (about(expected.norm), about(expected.norms_of_groups))
        for (updated, norm, zeros, by_group, has_heads), called, wrong_there in everyones:
            assert updated is expected.updated
            assert wrong_there is None
            assert has_heads is bool(expected.norms_of_groups)
            if case.needs_norms:
                assert (norm, by_group) == norms
            assert (zeros or 0) == (expected.zeros if case.count_zeros else 0)
            if not case.count_zeros:
                assert called == ["all_reduce"] * case.reductions
        assert len({repr(result) for result, _, _ in everyones}) == 1
