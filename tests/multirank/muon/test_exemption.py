"""What is exempt from clipping is left out of the same norm on every rank, in the reduction that is there anyway."""

import math

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("exempt-muon-from-clipping"), pytest.mark.ranks(2)]

# Of Adam's parameters, rank by rank; Muon's is 1e5 on rank 0. Narrowed: sqrt(30^2 + 0.4^2) = 30.0027.
ADAM = (30.0, 0.4, 0.0, 0.0)
MUON = 1e5
NARROWED, WHOLE = math.hypot(*ADAM), math.hypot(MUON, *ADAM)


@pytest.fixture
def muon():
    family = pytest.importorskip(
        "emerging_optimizers.orthogonalized_optimizers", reason="emerging_optimizers needs Python 3.12"
    )
    return family.Muon


@pytest.fixture
def deal_out(make_layer_wise, muon, world_size):
    """deal_out(with_adam=True): bf16 Muon and Adam, whose whole parameters are dealt out to ranks."""

    def make(with_adam=True, **settings):
        # The same names on all ranks; which rank gets which is LayerWise's to say.
        matrices, vectors = (
            [torch.nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16)) for _ in range(world_size)]
            for shape in ((4, 4), (16,))
        )
        children = [muon([{"params": list(matrices), "is_expert_parallel": False}], lr=0.1)]
        if with_adam:
            children.append(torch.optim.AdamW([{"params": list(vectors), "is_expert_parallel": False}], lr=0.1))
        optimizer = make_layer_wise(*children, clip_grad=1.0, **settings)
        for params, norms in ((matrices, (MUON, 0.0, 0.0, 0.0)), (vectors, ADAM)):
            for param, norm in zip(params, norms, strict=False):
                param.main_grad = torch.full(param.shape, norm / 4)
        return optimizer

    return make


@pytest.mark.ranks(2, 4)
def test_every_rank_narrows_to_the_same_norm(deal_out, from_all_ranks, count_collectives, world_size):
    optimizer = deal_out()
    assert [child.skip_grad_norm_clip for child in optimizer.chained_optimizers] == [True, False]
    optimizer.prepare_grads()
    count_collectives.clear()
    norm = optimizer.get_grad_norm()
    assert count_collectives == ["all_reduce"]
    results = from_all_ranks((norm, optimizer.clippable_grad_norms[None]))
    assert results == [(pytest.approx(WHOLE), pytest.approx(NARROWED, rel=1e-6))] * world_size
    exempt, rest = optimizer.chained_optimizers
    assert from_all_ranks(optimizer._get_grad_norm_over([rest])) == [pytest.approx(NARROWED, rel=1e-6)] * world_size


def test_muon_alone_measures_what_it_reports_and_nothing_else(
    deal_out, from_all_ranks, count_collectives, world_size, monkeypatch
):
    optimizer = deal_out(with_adam=False)
    assert optimizer.skip_grad_norm_clip is True

    def must_not_be_called():
        raise AssertionError("a norm for clipping was measured")

    monkeypatch.setattr(optimizer, "_compute_grad_norms_by_group", must_not_be_called)
    count_collectives.clear()
    updated, norm, _ = optimizer.step()
    assert count_collectives.count("all_reduce") == 1
    assert from_all_ranks((updated, norm)) == [(True, pytest.approx(MUON))] * world_size


@pytest.mark.ranks(2, 4)
def test_ranks_of_different_kinds_enter_the_same_reductions(parallel, from_all_ranks, count_collectives, rank):
    """The chain of one rank is exempt, the others are not; a subclass overrides the norm."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    class Own(ChainedOptimizer):
        def get_grad_norm(self):
            return super().get_grad_norm()

    parallel(tensor_model_parallel_size=dist.get_world_size())
    param = torch.nn.Parameter(torch.ones(4))
    param.main_grad, param.tensor_model_parallel = torch.full((4,), 2.0), True
    config = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=1.0)
    leaf = FP32Optimizer(torch.optim.SGD([{"params": [param]}], lr=0.1), config, lambda *args: None)
    leaf.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    leaf.skip_grad_norm_clip = rank == 0
    for kind in (ChainedOptimizer, Own):
        count_collectives.clear()
        kind([leaf]).step()
        assert len(set(from_all_ranks(tuple(count_collectives)))) == 1


def test_a_mimo_model_narrows_over_all_its_modules(make_mimo, from_all_ranks, rank, world_size):
    """Rank 0's module is exempt; the others clip by the norm of theirs."""
    param = torch.nn.Parameter(torch.ones(4))
    param.main_grad = torch.full((4,), (3.0 if rank else MUON) / 2)
    optimizer, mine = make_mimo([param], clip_grad=1.0)
    mine.skip_grad_norm_clip = rank == 0
    others = world_size - 1
    updated, norm, _ = optimizer.step()
    assert from_all_ranks((updated, norm)) == [(True, pytest.approx(math.hypot(MUON, *[3.0] * others)))] * world_size
    assert float(param.grad.norm()) == pytest.approx(1 / math.sqrt(others) if rank else MUON, rel=1e-5)


def test_a_chain_of_layer_wise_and_distributed(deal_out, make_ddp_model, from_all_ranks, count_collectives):
    """As Megatron chains them from 0.18 on: Muon dealt out to ranks, Adam sharded over them."""
    optimizer = deal_out(with_adam=False, beside=1.0)
    adam_norm = math.sqrt(sum(param.numel() for param in make_ddp_model().parameters()))
    optimizer.prepare_grads()
    count_collectives.clear()
    norm = optimizer.get_grad_norm()
    # Without model parallelism all ranks share Adam too: one reduction for both.
    assert count_collectives == ["all_reduce"]
    results = from_all_ranks((norm, optimizer.clippable_grad_norms[None]))
    assert results == [(pytest.approx(math.hypot(MUON, adam_norm)), pytest.approx(adam_norm))] * 2


@pytest.mark.guards("keep-newton-schulz-scale-invariant")
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("exponent", [0, -30, -60])
def test_newton_schulz_of_shards_is_the_same_for_a_small_matrix(
    muon, from_all_ranks, count_collectives, rank, world_size, unpatched, exponent
):
    """Normalised over all shards with one reduction, as unpatched."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    x = torch.randn(4 * world_size, 32, generator=torch.Generator().manual_seed(3)).chunk(world_size)[rank]
    group = dist.group.WORLD

    def orthogonalize(scale):
        count_collectives.clear()
        result = muon_utils.newton_schulz_tp(x * scale, 5, "quintic", group, partition_dim=0, tp_mode="distributed")
        return result, len(count_collectives)

    result, reductions = orthogonalize(2.0**exponent)
    with unpatched():
        expected, as_many = orthogonalize(1.0)
        small, _ = orthogonalize(2.0**-60)
    assert torch.equal(result, expected) and reductions == as_many
    assert small.norm() < 0.01 * expected.norm(), "emerging_optimizers has fixed it: the patch should say since when"
