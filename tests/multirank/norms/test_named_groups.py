"""--grad-norm-group: named groups are clipped by their norm on every rank, in the reduction of the other norms."""

import math

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-named-groups-separately"), pytest.mark.ranks(2)]


@pytest.fixture
def make(parallel, rank, world_size):
    """make(*groups): (optimizer, model) of get_megatron_optimizer; only the last rank's stage has a router."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    def make(*groups, **settings):
        parallel(pipeline_model_parallel_size=world_size)
        names = ["proj", "router"] if rank == world_size - 1 else ["proj"]
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in names})
        layers.mtp = torch.nn.Linear(4, 4, bias=False)
        layers.mtp.weight.grad_norm_group = "mtp"
        layers.to(torch.bfloat16 if settings.get("bf16") else torch.float32)
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(),
            layers,
        )
        config = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=1.0, grad_norm_group=list(groups), **settings)
        for name, param in layers.named_parameters():
            param.main_grad.fill_({"proj": 3.0, "router": 40.0, "mtp": 5.0}[name.split(".")[0]] / 4)
        return get_megatron_optimizer(config, [model]), layers

    return make


def test_each_group_is_clipped_by_its_norm_in_one_reduction(make, from_all_ranks, count_collectives, world_size):
    optimizer, layers = make("router=router:2.0")
    for _ in range(2):
        count_collectives.clear()
        updated, norm, _ = optimizer.step()
        assert count_collectives == ["all_reduce"]
    assert from_all_ranks((updated, float(norm) > 0)) == [(True, True)] * world_size
    optimizer, layers = make("router=router:2.0")
    _, norm, _ = optimizer.step()
    norms = {name: float(value) for name, value in optimizer.grad_norms_by_group.items()}
    main = 3.0 * math.sqrt(world_size)
    mtp = 5.0 * math.sqrt(world_size)
    expected = (pytest.approx(main), {"mtp": pytest.approx(mtp), "router": pytest.approx(40.0)})
    assert from_all_ranks((float(norm), norms)) == [expected] * world_size
    left = {name.split(".")[0]: float(param.main_grad.norm()) for name, param in layers.named_parameters()}
    assert left["proj"] == pytest.approx(1 / math.sqrt(world_size), rel=1e-5)
    assert left["mtp"] == pytest.approx(1 / math.sqrt(world_size), rel=1e-5)
    assert left.get("router", 2.0) == pytest.approx(2.0, rel=1e-5)


def test_the_norm_of_a_group_is_in_the_training_log(make):
    from megatron_overrides.report.metrics import training_metrics

    optimizer, _ = make("router=router:2.0")
    optimizer.step()
    assert [metric.text for metric in training_metrics() if metric.tag == "router-grad-norm"] == [
        " router grad norm: 40.000 |"
    ]


def test_a_group_that_matches_on_no_rank_is_an_error_on_every_rank(make):
    optimizer, _ = make("router=router:2.0", "experts=experts:1.0")
    with pytest.raises(ValueError, match="--grad-norm-group .* experts: no parameter on any rank matches 'experts'"):
        optimizer.step()


def test_groups_that_one_rank_has_tagged_do_not_widen_the_reduction_of_another_optimizer(make, rank, from_all_ranks):
    """As with an actor on some ranks and a critic on all: ranks that reduce tensors of different sizes hang."""
    from types import SimpleNamespace

    from megatron_overrides.norms.tags import tag_named_groups

    if rank == 1:
        tag_named_groups([torch.nn.Linear(2, 2)], SimpleNamespace(grad_norm_group=["actor=weight:1.0"]))
    optimizer, _ = make()
    updated, norm, _ = optimizer.step()
    assert from_all_ranks((updated, norm)) == [(True, norm)] * 2
