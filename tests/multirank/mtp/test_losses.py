"""The losses of the heads are those of float64 autograd on full logits, however the positions lie on the ranks."""

import pytest

from tests.oracles.losses.conditions import LAYOUTS, LOSSES, RANKS, SHARING_LAYOUTS, conditions, sharing_conditions

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("train-mtp-heads-for-acceptance"),
    pytest.mark.ranks(RANKS),
]


def compare(condition):
    """Return the differences of loss and gradient from the reference, the largest of all ranks."""
    import torch

    from tests.trainings.mtp_losses import difference

    largest = torch.tensor(difference(condition))
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.tolist()


def assert_close(differences):
    """The norms of all differences are at most a millionth of the loss and a hundred-thousandth of the gradient."""
    assert {name: pair for name, pair in differences.items() if pair[0] > 1e-6 or pair[1] > 1e-5} == {}


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradient_are_those_of_full_logits(parallel, layout, loss_type, record_property, pytestconfig):
    """With --write-tables in bfloat16, too; without it two of the four conditions where there are several ranks."""
    parallel(tensor_model_parallel_size=layout.tensor, context_parallel_size=layout.context)
    takes_all = pytestconfig.option.write_tables or layout is LAYOUTS[0]
    for dtype in ("float32", "bfloat16") if pytestconfig.option.write_tables else ("float32",):
        chosen = [condition for condition in conditions(layout, dtype) if condition.loss_type == loss_type]
        chosen = [one for one in chosen if takes_all or one.is_tied is one.is_detached]
        differences = {str(condition): compare(condition) for condition in chosen}
        assert len(differences) == (4 if takes_all else 2)
        for row, difference in differences.items():
            record_property("losses", [row, [*difference]])
        if dtype == "float32":
            assert_close(differences)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("loss_type", [loss_type for loss_type in LOSSES if loss_type != "lk"])  # counts as tv does
def test_a_position_weighs_the_same_however_sequences_and_batches_are_cut(parallel, world_size, loss_type):
    """NVIDIA/Megatron-LM#7498, #7513: uneven masks, and ranks and batches without a token that counts."""
    for layout in SHARING_LAYOUTS[world_size]:
        parallel(context_parallel_size=layout.context)
        chosen = [condition for condition in sharing_conditions(layout) if condition.loss_type == loss_type]
        differences = {str(condition): compare(condition) for condition in chosen}
        assert len(differences) == 10
        assert_close(differences)


@pytest.mark.parametrize("objective", ["kl", "tv", "lk"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_sharded_and_gathered_logits_give_the_divergence_of_the_full_vocabulary(parallel, rank, is_sharded, objective):
    """A case of NVIDIA/Megatron-LM#6473, with its vocabulary."""
    import torch

    from megatron_overrides.mtp.losses.divergences import Divergence
    from megatron_overrides.mtp.losses.vocabulary import Vocabulary

    group = parallel(tensor_model_parallel_size=RANKS).get_tensor_model_parallel_group()
    draft, teacher = torch.randn(2, 2, 1, 128256, generator=torch.Generator().manual_seed(2026)).unbind()
    whole = draft.clone().requires_grad_()
    p, q = teacher.softmax(-1), whole.softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)
    expected = {"kl": (p * (p.log() - q.log())).sum(-1), "tv": 1 - accepted, "lk": -accepted.log()}[objective]
    expected.sum().backward()

    def mine(logits):
        return logits.chunk(RANKS, dim=-1)[rank] if is_sharded else logits

    vocabulary = Vocabulary(None, group if is_sharded else None)
    shard = mine(draft).clone().requires_grad_()
    log_p = vocabulary.log_softmax(mine(teacher))[0]
    actual, acceptance, token = Divergence.apply(shard, log_p, vocabulary, objective)
    actual.sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shard.grad, mine(whole.grad), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(acceptance, accepted.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(token, draft.argmax(-1))
