"""Two norms in each step, of the main model and of the MTP heads; each clips its own parameters."""

import math

import pytest
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_overrides.norms.groups import tag

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-mtp-grads-separately")]

every_kind = pytest.mark.parametrize("kind", ["chained", "fp32", "float16", "distributed"])
MAIN, HEADS = 3.0, 40.0


def about(value):
    return pytest.approx(value, rel=2e-3)  # some gradients are bf16


@pytest.fixture
def make(make_optimizer):
    """make(kind, **config): (optimizer, main parameters, those of heads); their gradients have norms MAIN and HEADS."""

    def make(kind, main=MAIN, heads=HEADS, **config):
        optimizer, params = make_optimizer(kind, heads=True, **config)
        for half, norm in ((params[0::2], main), (params[1::2], heads)):
            numel = sum(param.numel() for param in half)
            for param in half:
                grad = torch.full(param.shape, norm / math.sqrt(numel))
                if hasattr(param, "main_grad"):
                    param.main_grad.copy_(grad)
                else:
                    param.main_grad = grad
        return optimizer, params[0::2], params[1::2]

    return make


def norms_left(optimizer):
    """The norms of the gradients with which the optimizer will step, of the main and of the heads."""
    from megatron_overrides.norms.optimizer_tree import leaves

    squares = {None: 0.0, "mtp": 0.0}
    for leaf in leaves(optimizer):
        for param in leaf.get_parameters():
            if param.grad is not None:
                squares[getattr(param, "grad_norm_group", None)] += float(param.grad.norm()) ** 2
    return [math.sqrt(square) for square in squares.values()]


@pytest.fixture
def stop_before_update(monkeypatch):
    """The step is taken without the update, so that clipped gradients can be looked at."""

    def stop(optimizer):
        monkeypatch.setattr(optimizer, "step_with_ready_grads", lambda: True)

    return stop


@every_kind
@pytest.mark.parametrize(
    "config, left",
    [
        ({"clip_grad": 1.0}, [1.0, 1.0]),
        ({"clip_grad": 10.0}, [MAIN, 10.0]),
        ({"clip_grad": 1.0, "mtp_clip_grad": 5.0}, [1.0, 5.0]),
        ({"clip_grad": 1.0, "mtp_clip_grad": 0.0}, [1.0, HEADS]),
        ({"clip_grad": 0.0, "mtp_clip_grad": 5.0}, [MAIN, 5.0]),
        ({"clip_grad": 0.0}, [MAIN, HEADS]),
    ],
)
def test_each_group_is_clipped_by_the_norm_of_that_group(make, stop_before_update, kind, config, left):
    optimizer, _, _ = make(kind, **config)
    stop_before_update(optimizer)
    _, norm, _ = optimizer.step()
    if kind == "chained" or any(config.values()):
        assert norm == about(MAIN)
        assert optimizer.grad_norms_by_group == {"mtp": about(HEADS)}
        assert optimizer.mtp_grad_norm == about(HEADS)
    assert norms_left(optimizer) == about(left)


@every_kind
def test_the_old_and_the_new_names_agree(make, kind):
    optimizer, _, _ = make(kind)
    optimizer.prepare_grads()
    assert optimizer.has_grad_norm_group("mtp")
    assert optimizer.get_grad_norm() == about(MAIN)
    assert optimizer._compute_grad_norms_by_group() == {"mtp": about(HEADS)}
    leaf = optimizer.chained_optimizers[0] if kind == "chained" else optimizer
    assert len(leaf.get_main_grads_for_grad_norm()) == len(leaf.get_grads_for_grad_norm()) == 1
    assert len(leaf.get_grads_for_grad_norm("mtp")) == 1


def test_the_gradients_of_a_named_group_are_not_the_main_model_s(make):
    optimizer, main, _ = make("fp32", grad_norm_group=["router=gate:1.0"])
    tag(main[0], "router")
    optimizer.prepare_grads()
    assert [len(optimizer.get_grads_for_grad_norm(group)) for group in (None, "mtp", "router")] == [0, 1, 1]


@pytest.mark.parametrize("kind", ["fp32", "float16", "distributed"])
def test_clip_grad_norm_clips_each_and_returns_the_main_one(make, kind):
    optimizer, _, _ = make(kind, mtp_clip_grad=5.0)
    optimizer.prepare_grads()
    assert optimizer.clip_grad_norm(2.0) == about(MAIN)
    assert norms_left(optimizer) == about([2.0, 5.0])
    assert optimizer.clip_grad_norm(0.0) == about(2.0)  # measures only
    assert norms_left(optimizer) == about([2.0, 5.0])


def test_an_unknown_group_is_an_error(make):
    optimizer, main, _ = make("fp32")
    main[0].grad_norm_group = "heads"
    optimizer.prepare_grads()
    with pytest.raises(ValueError, match="Unknown grad_norm_group 'heads'"):
        optimizer.get_grad_norm()
    with pytest.raises(ValueError, match="Unknown grad_norm_group 'heads'"):
        optimizer.get_grads_for_grad_norm("heads")


def test_a_subclass_of_another_library_measures_its_own_main_norm(make):
    """Beside an optimizer of Megatron's in one chain."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    optimizer, _, _ = make("chained", clip_grad=0.0)
    first, second = optimizer.chained_optimizers
    first.__class__ = type("Theirs", (type(first),), {"get_grad_norm": lambda self: 7.0})
    expected = math.sqrt(7.0**2 + MAIN**2 / 2)
    assert ChainedOptimizer([first, second]).step()[1] == about(expected)


def test_norms_on_the_device_are_never_read_on_the_host(make, monkeypatch):
    from megatron.core.optimizer import clip_grads

    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is None:
        pytest.skip("norms stay on the device from megatron-core 0.17 on, with TransformerEngine >= 2.14")
    reads = []
    optimizer, _, _ = make("chained", clip_grad=1.0)
    monkeypatch.setattr(optimizer, "step_with_ready_grads", lambda: True)
    optimizer.step()  # the first step asks once who owns heads
    for name in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _o=original, _n=name: (reads.append(_n), _o(self, *a))[1]
        )
    _, norm, _ = optimizer.step()
    monkeypatch.undo()
    assert isinstance(norm, torch.Tensor) and norm.item() == about(1.0)  # clipped in place in the first
    assert isinstance(optimizer.mtp_grad_norm, torch.Tensor)
    assert reads == []


def test_methods_borrowed_onto_another_class_work(make):
    """As upstream's own tests do."""

    class Borrower:
        _filter_grads_for_norm = MegatronOptimizer._filter_grads_for_norm
        get_grads_for_grad_norm = MegatronOptimizer.get_grads_for_grad_norm
        get_grad_stats_parallel_group = MegatronOptimizer.get_grad_stats_parallel_group
        has_grad_norm_group = MegatronOptimizer.has_grad_norm_group
        _compute_grad_norms_by_group = MegatronOptimizer._compute_grad_norms_by_group
        clip_grad_norm = MegatronOptimizer.clip_grad_norm

        def __init__(self, optimizer):
            self.config, self.get_parameters = optimizer.config, optimizer.get_parameters

    optimizer, _, _ = make("fp32")
    optimizer.prepare_grads()
    borrower = Borrower(optimizer)
    assert borrower.has_grad_norm_group("mtp")
    assert borrower._compute_grad_norms_by_group() == {"mtp": about(HEADS)}
    assert borrower.clip_grad_norm(1.0) == about(MAIN)
    assert norms_left(optimizer) == about([1.0, 1.0])


@pytest.mark.parametrize("chained", [False, True])
def test_an_override_that_calls_super_is_no_loop(make, chained):
    """As with a wrapper that times or logs it."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    optimizer, _, _ = make("fp32", clip_grad=1.0)
    logged = []

    def get_grad_norm(self):
        logged.append(super(type(optimizer), self).get_grad_norm())
        return logged[-1]

    optimizer.__class__ = type("Logged", (type(optimizer),), {"get_grad_norm": get_grad_norm})
    stepped = ChainedOptimizer([optimizer]) if chained else optimizer
    assert stepped.step()[1] == about(MAIN) == about(logged[0])
    assert stepped.grad_norms_by_group == {"mtp": about(HEADS)}


def test_a_subclass_may_choose_the_gradients_of_the_main_norm(make):
    """Under the name that the method had up to 0.18."""
    optimizer, _, _ = make("chained", clip_grad=0.0)
    first = optimizer.chained_optimizers[0]
    first.__class__ = type("Chooser", (type(first),), {"get_main_grads_for_grad_norm": lambda self: []})
    assert optimizer.step()[1] == about(MAIN / math.sqrt(2))


@pytest.mark.parametrize("kind", ["fp32", "float16", "distributed"])
def test_an_overridden_main_norm_leaves_the_heads_theirs(make, stop_before_update, kind):
    for call in (lambda optimizer: optimizer.step()[1], lambda optimizer: optimizer.clip_grad_norm(1.0)):
        optimizer, _, _ = make(kind, clip_grad=1.0)
        optimizer.__class__ = type("Theirs", (type(optimizer),), {"get_grad_norm": lambda self: 2 * MAIN})
        stop_before_update(optimizer)
        optimizer.prepare_grads()
        assert call(optimizer) == 2 * MAIN
        assert norms_left(optimizer) == about([0.5, 1.0])


def test_an_optimizer_without_process_groups_measures_this_rank():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    param = torch.nn.Parameter(torch.ones(4))
    param.grad, param.grad_norm_group = torch.ones(4), "mtp"

    class Theirs:
        config = OptimizerConfig(optimizer="adam", lr=0.1, mtp_grad_norm_skip_threshold=1.0)
        get_grad_norm = staticmethod(lambda: 2.0)
        get_parameters = staticmethod(lambda: [param])
        get_grads_for_grad_norm = staticmethod(lambda group=None: [param.grad])
        prepare_grads = staticmethod(lambda: False)
        step_with_ready_grads = staticmethod(lambda: True)

    chain = ChainedOptimizer([Theirs()])
    assert chain.step()[:2] == (True, 2.0)
    assert chain.mtp_grad_norm == 2.0 and param.grad is None  # over its threshold, left out of the update


def test_a_child_that_knows_no_ranks_has_no_heads_on_others(make):
    from types import SimpleNamespace

    from megatron_overrides.norms.measuring import has_grad_norm_group

    unknown = SimpleNamespace(get_parameters=lambda: [])
    assert not has_grad_norm_group(SimpleNamespace(chained_optimizers=[unknown]), "mtp")
    leaf, _, _ = make("fp32")
    assert has_grad_norm_group(SimpleNamespace(chained_optimizers=[unknown, leaf]), "mtp")
