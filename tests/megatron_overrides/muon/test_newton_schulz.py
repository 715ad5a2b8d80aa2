"""Newton-Schulz gives the same for a gradient of any size."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("keep-newton-schulz-scale-invariant")]

pytest.importorskip("emerging_optimizers", reason="emerging_optimizers needs Python 3.12")


@pytest.fixture
def newton_schulz():
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    return muon_utils.newton_schulz


def matrix(*shape):
    return torch.randn(*shape, generator=torch.Generator(torch.get_default_device()).manual_seed(3))


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (3, 6, 8)])
@pytest.mark.parametrize("exponent", [-30, -50, -75])
def test_it_is_the_same_for_a_small_input(newton_schulz, shape, exponent):
    """Powers of two change no digit, so the results are equal to the bit."""
    x = matrix(*shape)
    assert torch.equal(newton_schulz(x * 2.0**exponent, steps=5), newton_schulz(x, steps=5))


def test_only_the_small_matrices_of_a_batch_are_lifted(newton_schulz):
    x = matrix(2, 6, 8)
    x[1] *= 2.0**-40
    assert torch.equal(newton_schulz(x, steps=5), newton_schulz(torch.stack([x[0], x[1] * 2.0**40]), steps=5))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_inputs_over_the_floor_are_left_as_they_are(newton_schulz, unpatched, scale):
    x = matrix(8, 6) * scale
    with unpatched():
        from emerging_optimizers.orthogonalized_optimizers import muon_utils

        expected = muon_utils.newton_schulz(x, steps=5)
    assert torch.equal(newton_schulz(x, steps=5), expected)


@pytest.mark.parametrize("x", [torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4).double(), torch.ones(4)])
def test_what_the_package_refuses_it_still_refuses(newton_schulz, x):
    with pytest.raises(TypeError, match="must be"):
        newton_schulz(x, steps=5)


def test_nothing_comes_of_nothing(newton_schulz):
    assert not newton_schulz(torch.zeros(4, 4), steps=5).any()


def test_a_floor_of_the_users_own(newton_schulz):
    x = matrix(8, 6)
    x *= 2.0**-4 / 2.0 ** torch.frexp(x.norm()).exponent
    assert torch.equal(newton_schulz(x, steps=5, eps=0.5), newton_schulz(x * 2.0**60, 5, "quintic", None, 0.5))
