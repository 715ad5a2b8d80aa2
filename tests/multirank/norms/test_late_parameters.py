"""Parameters that an optimizer gets after its first step are measured and clipped as plain PyTorch does it."""

import pytest
import torch

from megatron_overrides.norms.step_state import step_state_of

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Where norms are compared: on the device from 0.17 on with TransformerEngine >= 2.14, otherwise on the host."""
    from megatron.core.optimizer import clip_grads

    if request.param == "host":
        monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None, raising=False)
    elif getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is None:
        pytest.skip("norms stay on the device from megatron-core 0.17 on, with TransformerEngine >= 2.14")
    return request.param


@pytest.fixture
def make(make_leaf, monkeypatch):
    """make(norm, **config): a chain of one optimizer, whose step ends before the update."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    def make(norm, **config):
        optimizer = ChainedOptimizer([make_leaf({None: norm}, **config)])
        monkeypatch.setattr(optimizer, "step_with_ready_grads", lambda: True)
        return optimizer

    return make


def add(optimizer, param):
    param.tensor_model_parallel = True
    optimizer.chained_optimizers[0].optimizer.add_param_group({"params": [param]})
    return param


def give(param, norm):
    param.main_grad = torch.full((4,), norm / 2)


def clipped_by_torch(gradients, limit):
    """(norm of all ranks' gradients, what torch leaves of each)."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    return float(torch.nn.utils.clip_grad_norm_(params, limit)), [param.grad for param in params]


def test_heads_that_join_on_one_rank_are_clipped_separately(make, where, rank, from_all_ranks, count_collectives):
    optimizer = make(3.0, clip_grad=1.0)
    optimizer.step()
    heads = []
    if rank == 1:
        heads = [add(optimizer, torch.nn.Parameter(torch.ones(4)))]
        heads[0].grad_norm_group = "mtp"
    for norm in (40.0, 0.5):  # over the limit, and under it
        (main, *_) = optimizer.get_parameters()
        give(main, 3.0)
        for head in heads:
            give(head, norm)
        right, (left, *_) = clipped_by_torch(sum(from_all_ranks([main.main_grad.clone()]), []), limit=1.0)
        right_of_heads, (left_of_heads,) = clipped_by_torch([torch.full((4,), norm / 2)], limit=1.0)
        count_collectives.clear()
        assert float(optimizer.step()[1]) == pytest.approx(right)
        assert count_collectives == ["all_reduce"]
        torch.testing.assert_close(main.grad, left)
        for head in heads:
            torch.testing.assert_close(head.grad, left_of_heads)
        reported = {name: float(value) for name, value in optimizer.grad_norms_by_group.items()}
        knows = where == "host" or rank == 1  # on the device, others would have to wait for the number of owners
        assert reported == ({"mtp": pytest.approx(right_of_heads)} if knows else {})


@pytest.mark.parametrize("threshold", ["grad_norm_skip_threshold", "mtp_grad_norm_skip_threshold"])
def test_heads_that_join_on_one_rank_are_held_to_their_threshold_on_all(make, where, rank, from_all_ranks, threshold):
    optimizer = make(3.0, **{threshold: 20.0})
    optimizer.step()
    if rank == 1:
        head = add(optimizer, torch.nn.Parameter(torch.ones(4)))
        head.grad_norm_group = "mtp"
        give(head, 40.0)
    assert optimizer.step()[0] is True
    excess = step_state_of(optimizer).decision.mtp_excess
    assert from_all_ranks(excess) == [(pytest.approx(40.0), 20.0)] * 2
    assert rank == 0 or head.grad is None


def test_a_parameter_that_is_no_longer_frozen_counts(make, where, rank, from_all_ranks, count_collectives):
    optimizer = make(3.0, clip_grad=1.0)
    frozen = add(optimizer, torch.nn.Parameter(torch.ones(4), requires_grad=False))
    optimizer.step()
    main, _ = optimizer.get_parameters()
    give(main, 3.0)
    if rank == 0:
        frozen.requires_grad_(True)
        give(frozen, 4.0)
    mine = [param.main_grad.clone() for param in (main, frozen) if hasattr(param, "main_grad")]
    right, left = clipped_by_torch(sum(from_all_ranks(mine), []), limit=1.0)
    count_collectives.clear()
    assert float(optimizer.step()[1]) == pytest.approx(right)
    assert count_collectives == ["all_reduce"]
    if rank == 0:
        torch.testing.assert_close([main.grad, frozen.grad], left[:2])
    else:
        torch.testing.assert_close([main.grad], left[2:])
