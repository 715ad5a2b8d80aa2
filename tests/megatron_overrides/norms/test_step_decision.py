"""The decision of a step: a function of its norms and the configuration, with no process group and no optimizer."""

import math
from types import SimpleNamespace

import pytest

from megatron_overrides.norms.step_decision import decide, needs_norms
from megatron_overrides.norms.values import GradNorms

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("skip-update-on-large-grad-norm")]


class OnTheGpu(float):
    """A norm that must not be read on the host."""

    def __le__(self, other):
        raise AssertionError("the norm was read")

    __gt__ = __lt__ = __ge__ = __float__ = __le__


def norms(main, mtp=None, main_clipping=None, mtp_clipping=None):
    total, clipping = {None: main}, {None: main if main_clipping is None else main_clipping}
    if mtp is not None:
        total["mtp"], clipping["mtp"] = mtp, mtp if mtp_clipping is None else mtp_clipping
    return GradNorms(total, clipping)


def config(threshold=math.inf, mtp=math.inf, **rest):
    return SimpleNamespace(
        grad_norm_skip_threshold=threshold, mtp_grad_norm_skip_threshold=mtp, **{"clip_grad": 0.0, **rest}
    )


def test_without_a_finite_threshold_no_norm_is_read():
    decision = decide(norms(OnTheGpu(1.0), OnTheGpu(1.0)), config())
    assert (decision.skips_update, decision.skips_mtp) == (False, False)


@pytest.mark.parametrize(
    "main, mtp, threshold, mtp_threshold, expected",
    [
        (1.0, 9.0, 2.0, math.inf, (False, False)),
        (3.0, 1.0, 2.0, math.inf, (True, False)),
        (2.0, 1.0, 2.0, math.inf, (False, False)),  # at the threshold, not over it
        (math.nan, 1.0, 2.0, math.inf, (True, False)),
        (1.0, 3.0, 2.0, None, (False, True)),  # None: the main threshold holds for the heads too
        (1.0, math.nan, math.inf, 2.0, (False, True)),
        (3.0, 3.0, 2.0, 2.0, (True, False)),  # the whole update is skipped, the heads' with it
        (1.0, None, 2.0, 0.5, (False, False)),  # no heads with a separate norm
    ],
)
def test_each_norm_has_its_threshold(main, mtp, threshold, mtp_threshold, expected):
    decision = decide(norms(main, mtp), config(threshold, mtp_threshold))
    assert (decision.skips_update, decision.skips_mtp) == expected


def test_the_decision_says_which_norm_was_over_which_threshold():
    assert decide(norms(3.0), config(2.0)).update_excess == (3.0, 2.0)
    assert decide(norms(1.0, 5.0), config(4.0, None)).mtp_excess == (5.0, 4.0)


@pytest.mark.parametrize("total, skipped", [(1e6, False), (math.nan, True), (math.inf, True)])
def test_exempt_gradients_may_have_any_size_but_must_be_numbers(total, skipped):
    assert decide(norms(total, main_clipping=1.0), config(2.0)).skips_update is skipped


def test_without_the_patch_that_separates_them_the_main_threshold_is_not_that_of_the_heads():
    settings = SimpleNamespace(grad_norm_skip_threshold=2.0)
    assert not decide(norms(1.0, 40.0), settings).skips_mtp
    settings.mtp_grad_norm_skip_threshold = None
    assert decide(norms(1.0, 40.0), settings).skips_mtp


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({}, False),
        ({"clip_grad": 1.0}, True),
        ({"mtp_clip_grad": 1.0}, True),
        ({"clip_grad": 1.0, "mtp_clip_grad": 0.0}, True),
        ({"grad_norm_group": ["router=router:1.0"]}, True),
        ({"grad_norm_group": ["router=router:0"]}, True),  # LIMIT 0 measures
        ({"threshold": 1.0}, True),
        ({"mtp": 1.0}, True),
    ],
)
def test_norms_are_needed_for_clipping_for_thresholds_and_for_named_groups(settings, needed):
    assert needs_norms(config(**settings)) is needed


def test_a_named_group_without_parameters_is_an_error():
    settings = config(grad_norm_group=["router=mlp.router:1.0", "gdn=in_proj:1.0"])
    measured = GradNorms({None: 1.0, "router": 2.0}, {None: 1.0, "router": 2.0})
    with pytest.raises(ValueError, match=r"--grad-norm-group .* gdn: no parameter on any rank matches 'in_proj'"):
        decide(measured, settings)
