"""Optimizers of the Muon family are exempt from clipping, the others are not."""

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from megatron_overrides.norms.step_state import last_step_state
from megatron_overrides.report.metrics import step_metrics

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("exempt-muon-from-clipping")]

FAMILY = "emerging_optimizers.orthogonalized_optimizers"


@pytest.fixture
def family():
    return pytest.importorskip(FAMILY, reason="emerging_optimizers needs Python 3.12")


def wrap(optimizer, **settings):
    """As Megatron does, in FP32."""
    return FP32Optimizer(optimizer, OptimizerConfig(lr=0.1, **settings), lambda *args: None)


def matrices(dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))]


@pytest.mark.parametrize("name", ["Muon", "AdaptiveMuon"])
def test_the_muon_family_is_exempt_however_wrapped(family, name):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    if name == "AdaptiveMuon":
        settings |= {"moment2_method": "adamuon", "beta2": 0.9, "eps": 1e-8}
    make = getattr(family, name)
    assert wrap(make(matrices(), **settings)).skip_grad_norm_clip is True
    config = OptimizerConfig(lr=0.1, bf16=True)
    groups = [{"params": matrices(torch.bfloat16)}]
    half = Float16OptimizerWithFloat16Params(make(groups, **settings), config, None, lambda *args: None)
    assert half.skip_grad_norm_clip is True
    assert ChainedOptimizer([half]).skip_grad_norm_clip is True


@pytest.mark.parametrize("name", ["PolarGrad", "MOP"])
def test_those_that_put_the_size_of_the_gradient_back_are_clipped(family, name):
    assert wrap(getattr(family, name)(matrices(), lr=0.1)).skip_grad_norm_clip is False


def test_soap_lion_and_torchs_own_are_clipped(family):
    from emerging_optimizers.scalar_optimizers import Lion
    from emerging_optimizers.soap import SOAP

    for make in (SOAP, Lion, torch.optim.AdamW, torch.optim.SGD):
        assert wrap(make(matrices(), lr=0.1)).skip_grad_norm_clip is False


def test_without_emerging_optimizers_nothing_is_exempt(monkeypatch):
    """Megatron then calls `object` what every optimizer is an instance of."""
    monkeypatch.delitem(sys.modules, FAMILY, raising=False)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.optimizer") and hasattr(module, "OrthogonalizedOptimizer"):
            monkeypatch.setattr(module, "OrthogonalizedOptimizer", object)
    assert wrap(torch.optim.AdamW(matrices(), lr=0.1)).skip_grad_norm_clip is False


def test_the_flag_clips_them_all_the_same(family):
    assert wrap(family.Muon(matrices(), lr=0.1), clip_orthogonalizing_optimizers=True).skip_grad_norm_clip is False


def test_the_user_may_decide_otherwise(family):
    muon, adam = wrap(family.Muon(matrices(), lr=0.1)), wrap(torch.optim.AdamW(matrices(), lr=0.1))
    muon.skip_grad_norm_clip, adam.skip_grad_norm_clip = False, True
    assert (muon.skip_grad_norm_clip, adam.skip_grad_norm_clip) == (False, True)


def test_a_chain_is_exempt_if_all_in_it_is(family):
    muon, adam = wrap(family.Muon(matrices(), lr=0.1)), wrap(torch.optim.AdamW(matrices(), lr=0.1))
    assert ChainedOptimizer([muon, muon]).skip_grad_norm_clip is True
    assert ChainedOptimizer([ChainedOptimizer([muon]), muon]).skip_grad_norm_clip is True
    assert ChainedOptimizer([muon, adam]).skip_grad_norm_clip is False
    assert ChainedOptimizer([]).skip_grad_norm_clip is False
    with pytest.raises(AttributeError, match="set it on its chained_optimizers"):
        ChainedOptimizer([adam]).skip_grad_norm_clip = True


def test_an_optimizer_of_another_library_is_clipped():
    from megatron_overrides.norms.optimizer_tree import is_exempt

    class MockLike:
        def __getattr__(self, name):
            return object()

    assert not is_exempt(SimpleNamespace()) and not is_exempt(MockLike())


# -- what follows from it ---------------------------------------------------------------------------------------------


ALL = {(True, None): 1e5, (False, None): 30.0, (True, "mtp"): 1e4, (False, "mtp"): 40.0}


def left(chain):
    return [pytest.approx(float(param.grad.norm()), rel=1e-5) for param in chain.get_parameters()]


def test_the_norm_over_some_of_a_chain(make_chain):
    chain = make_chain({(True, None): 1e5, (False, None): 30.0})
    chain.prepare_grads()
    exempt, rest = chain.chained_optimizers
    assert chain._get_grad_norm_over([rest]) == pytest.approx(30.0)
    assert chain._get_grad_norm_over([exempt]) == pytest.approx(1e5)
    assert chain._get_grad_norm_over([exempt, rest]) == chain.get_grad_norm()
    assert chain._get_grad_norm_over([]) == 0.0


def test_an_overridden_norm_still_clips(make_chain):
    """A subclass with its own get_grad_norm: its norm clips where nothing is exempt, the narrowed one elsewhere."""
    for norms, expected in ((ALL, [1e5, 1e4, 1.0, 1.0]), ({(False, None): 30.0}, [0.5])):
        chain = make_chain(norms, clip_grad=1.0)
        chain.__class__ = type("Own", (ChainedOptimizer,), {"get_grad_norm": lambda self: 60.0})
        assert chain.step()[1] == 60.0
        assert expected == left(chain)


def test_overridden_norms_of_groups_clip(make_chain):
    def ours_times_two(self):
        self.grad_norms_by_group = {"mtp": 80.0}
        return self.grad_norms_by_group

    chain = make_chain(ALL, clip_grad=1.0)
    chain.__class__ = type("Own", (ChainedOptimizer,), {"_compute_grad_norms_by_group": ours_times_two})
    chain.step()
    assert left(chain) == [1e5, 1e4, 1.0, 0.5]


def test_the_overridden_norm_of_an_exempt_optimizer_clips_nothing(make_chain):
    chain = make_chain({(True, None): 1e5, (False, None): 30.0}, clip_grad=1.0)
    exempt = chain.chained_optimizers[0]
    exempt.__class__ = type("Theirs", (FP32Optimizer,), {"get_grad_norm": lambda self: 40.0})
    assert chain.step()[1] == pytest.approx(50.0)
    assert left(chain) == [1e5, 1.0]


def test_overridden_norms_of_groups_are_not_measured_for_nothing(make_chain):
    chain = make_chain({(False, None): 30.0}, clip_grad=0.0)
    chain.__class__ = type("Own", (ChainedOptimizer,), {"_compute_grad_norms_by_group": lambda self: 1 / 0})
    assert chain.step()[:2] == (True, pytest.approx(30.0))


@pytest.mark.parametrize("exempt, shown", [([True, True], 0), ([False, False], 0), ([True, False], 1)])
def test_the_norm_that_clips_is_shown_only_beside_another(make_chain, exempt, shown):
    chain = make_chain(ALL, clip_grad=1.0)
    for leaf, is_exempt in zip(chain.chained_optimizers, exempt, strict=True):
        leaf.skip_grad_norm_clip = is_exempt
    chain.step()
    assert [metric.label for metric in step_metrics(last_step_state())].count("clippable grad norm") == shown
