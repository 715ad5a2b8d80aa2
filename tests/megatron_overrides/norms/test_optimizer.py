"""One step of every kind of optimizer: as upstream without a threshold, all or nothing with one."""

import math
from contextlib import nullcontext

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("skip-update-on-large-grad-norm")]

every_kind = pytest.mark.parametrize("kind", ["chained", "fp32", "float16", "distributed"])


@pytest.fixture
def run(make_optimizer, give_gradients, snapshot):
    """run(kind, steps=[scale of the gradients, ...], **config): what each step returned, and the end state."""

    def run(kind, scales, during=nullcontext, **config):
        optimizer, params = make_optimizer(kind, **config)
        results = []
        with during():
            for scale in scales:
                optimizer.zero_grad()
                give_gradients(params, scale)
                results.append(optimizer.step())
        return results, snapshot(optimizer, params)

    return run


def clip_by(optimizer, norms):
    from megatron_overrides.norms.clipping import clip
    from megatron_overrides.norms.values import GradNorms

    clip(optimizer, GradNorms(norms, norms))


@every_kind
@pytest.mark.parametrize("clip_grad, log_num_zeros_in_grad", [(0.0, False), (1.0, True)])
def test_without_a_threshold_a_step_is_upstreams_to_the_bit(
    run, unpatched, assert_same, kind, clip_grad, log_num_zeros_in_grad
):
    config = {"clip_grad": clip_grad, "log_num_zeros_in_grad": log_num_zeros_in_grad}
    expected, expected_state = run(kind, [1.0, 3.0, 0.0], during=unpatched, **config)
    actual, actual_state = run(kind, [1.0, 3.0, 0.0], **config)
    assert actual == expected
    assert_same(actual_state, expected_state)


@pytest.mark.parametrize("kind", ["fp32", "chained"])
def test_an_optimizer_without_parameters_counts_no_zeros(make_optimizer, kind):
    """With a precision-aware optimizer 0.18 and newer read the first parameter: an error here, a hang elsewhere."""
    optimizer, _ = make_optimizer(kind)
    optimizer.config.use_precision_aware_optimizer = True
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in leaf.optimizer.param_groups:
            group["params"] = []
    assert optimizer.count_zeros() == 0


@every_kind
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_a_norm_over_the_threshold_changes_nothing(run, assert_same, kind, clip_grad):
    config = {"clip_grad": clip_grad, "grad_norm_skip_threshold": 50.0}
    _, before = run(kind, [1.0], **config)
    (taken, skipped), after = run(kind, [1.0, 1e4], **config)
    assert taken[0] is True and 0.0 < taken[1] <= 50.0
    assert skipped[0] is False and skipped[1] > 50.0
    assert_same(after, before)


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_skipped(run, assert_same, kind, bad):
    config = {"clip_grad": 1.0, "grad_norm_skip_threshold": 50.0}
    _, before = run(kind, [1.0], **config)
    results, after = run(kind, [1.0, bad], **config)
    assert results[-1][0] is False
    assert not math.isfinite(results[-1][1])
    assert_same(after, before)


def test_the_gradients_of_a_skipped_step_are_not_clipped(make_optimizer, give_gradients):
    optimizer, params = make_optimizer("chained", clip_grad=1.0, grad_norm_skip_threshold=2.0)
    give_gradients(params, 100.0)
    grads = [param.main_grad.clone() for param in params]
    assert optimizer.step()[0] is False
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))


@every_kind
def test_overflow_found_by_the_loss_scaler_comes_first(make_optimizer, give_gradients, monkeypatch, kind):
    from megatron_overrides.norms.step_state import last_step_state

    optimizer, params = make_optimizer(kind, grad_norm_skip_threshold=2.0)
    give_gradients(params, 100.0)
    assert optimizer.step()[0] is False and last_step_state().decision.skips_update
    monkeypatch.setattr(optimizer, "prepare_grads", lambda: True)
    assert optimizer.step() == (False, None, None)
    assert last_step_state().decision == (None, None, True)  # no norm was over the threshold in this step
    assert last_step_state().skipped_updates.total == 1 and last_step_state().skips == 2


def test_decoupled_gradients_are_clipped_where_a_precision_aware_optimizer_has_them(make_optimizer):
    optimizer, params = make_optimizer("fp32", clip_grad=1.0)
    optimizer.config.use_precision_aware_optimizer = True
    for param in params:
        param.decoupled_grad = torch.full_like(param, 10.0)
    clip_by(optimizer, {None: 10.0})
    assert all(torch.allclose(param.decoupled_grad, torch.ones_like(param)) for param in params)


def give_gradients_of_two_dtypes(params):
    """A decoupled gradient in bf16 beside one in fp32, each with the norm 3."""
    for param, dtype in zip(params, (torch.bfloat16, torch.float32), strict=True):
        param.decoupled_grad = torch.full_like(param, 3.0 / param.numel() ** 0.5, dtype=dtype)


@pytest.mark.guards("read-gradients-in-their-dtype")
@pytest.mark.parametrize("in_one_leaf", [True, False])
def test_gradients_of_two_dtypes_are_measured_and_clipped(make_optimizer, monkeypatch, in_one_leaf):
    """The kernel reads a list by the dtype of its first tensor; what stands for it refuses such a list."""
    from megatron.core.optimizer import clip_grads

    from megatron_overrides.norms.measuring import measure

    launched = []
    apply = clip_grads.multi_tensor_applier
    monkeypatch.setattr(
        clip_grads,
        "multi_tensor_applier",
        lambda kernel, flag, lists, *args: (
            launched.append([{one.dtype for one in each} for each in lists]) or apply(kernel, flag, lists, *args)
        ),
    )
    optimizer, params = make_optimizer("fp32" if in_one_leaf else "chained", clip_grad=1.0)
    optimizer.config.use_precision_aware_optimizer = True
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    pairs = [params[:2]] if in_one_leaf else [params[0::2], params[1::2]]  # the two leaves have gradients of each dtype
    for pair in pairs:
        give_gradients_of_two_dtypes(pair)
    norm = (3.0**2 * len(params)) ** 0.5
    norms = measure(optimizer)
    assert float(norms.total[None]) == pytest.approx(norm, rel=4e-3)
    assert launched == [[{torch.bfloat16}], [{torch.float32}]]
    clip_by(optimizer, {None: norm})
    assert all(len(dtypes) == 1 for lists in launched for dtypes in lists)
    for param in params:
        assert float(param.decoupled_grad.float().norm()) == pytest.approx(3.0 / norm, rel=8e-3)


def test_a_decoupled_gradient_is_clipped_beside_one_in_grad(make_optimizer):
    optimizer, (decoupled, plain) = make_optimizer("fp32", clip_grad=1.0)
    optimizer.config.use_precision_aware_optimizer = True
    decoupled.decoupled_grad = torch.full_like(decoupled, 10.0)
    plain.grad = torch.full_like(plain, 10.0)
    clip_by(optimizer, {None: 10.0})
    assert torch.allclose(decoupled.decoupled_grad, torch.ones(())) and torch.allclose(plain.grad, torch.ones(()))


def test_empty_gradients_are_given_to_no_kernel(make_optimizer):
    """A shard may be empty: TransformerEngine's kernel leaves out the tensors before it, from 2.18 on it refuses."""
    from megatron_overrides.norms.measuring import measure

    optimizer, (full, _) = make_optimizer("fp32", clip_grad=1.0)
    empty = torch.nn.Parameter(torch.ones(0))
    empty.tensor_model_parallel = True
    optimizer.optimizer.add_param_group({"params": [empty]})
    full.grad, empty.grad = torch.full_like(full, 10.0), torch.ones(0)
    norm = float(full.grad.norm())
    assert float(measure(optimizer).total[None]) == pytest.approx(norm)
    clip_by(optimizer, {None: norm})
    assert float(full.grad.norm()) == pytest.approx(1.0, rel=1e-5)


@every_kind
def test_gradients_that_were_casted_for_the_update_are_given_back_when_it_is_skipped(
    make_optimizer, give_gradients, kind
):
    """As Megatron-FSDP v2 of main keeps them: its next step starts by asserting that none is left."""
    from megatron_overrides.norms.optimizer_tree import leaves

    optimizer, params = make_optimizer(kind, grad_norm_skip_threshold=2.0)
    give_gradients(params, 100.0)
    leaf = next(leaves(optimizer))
    param = leaf.get_parameters()[0]
    own = torch.ones_like(param, dtype=torch.bfloat16)
    leaf._casted_grads = [(param, own)]
    assert optimizer.step()[0] is False
    assert leaf._casted_grads == []
    assert param.grad is own and param.grad_dtype == torch.bfloat16


def test_stubs_are_left_alone(make_optimizer):
    optimizer, params = make_optimizer("fp32", clip_grad=1.0)
    optimizer.is_stub_optimizer = True
    params[0].grad = torch.full_like(params[0], 10.0)
    clip_by(optimizer, {None: 10.0})
    assert torch.equal(params[0].grad, torch.full_like(params[0], 10.0))


def test_a_chain_lists_the_parameters_of_all_its_children(make_optimizer):
    optimizer, params = make_optimizer("chained")
    assert all(left is right for left, right in zip(optimizer.get_parameters(), params, strict=True))


def test_a_bare_optimizer_keeps_its_timers(make_optimizer, give_gradients):
    started, stopped = [], []

    class Timer:
        def __init__(self, name):
            self.name = name

        def start(self, barrier):
            started.append(self.name)

        def stop(self):
            stopped.append(self.name)

    optimizer, params = make_optimizer("fp32")
    optimizer.config.timers = lambda name, log_level=None: Timer(name)
    give_gradients(params)
    optimizer.step()
    assert started == stopped
    assert started[1:3] == ["optimizer-clip-main-grad", "optimizer-count-zeros"]
