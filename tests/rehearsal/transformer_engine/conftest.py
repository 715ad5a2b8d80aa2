"""TransformerEngine's Python with the stand-ins of a rehearsal for its kernels, compared with plain torch."""

import pytest


@pytest.fixture(autouse=True)
def seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def assert_same():
    """assert_same(found, expected, dtype=torch.float32): they are equal within the rounding of that dtype."""
    import torch

    def check(actual, expected, dtype=torch.float32):
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture
def assert_same_gradients(assert_same):
    """assert_same_gradients(found, expected, inputs, dtype=torch.float32, scale=1.0): the gradients are equal.

    The gradients are divided by `scale`, so that a sum over many terms has the tolerance of one.
    """
    import torch

    def check(actual, expected, inputs, dtype=torch.float32, scale=1.0):
        grad = torch.randn_like(expected)
        for one, other in zip(
            torch.autograd.grad(actual, inputs, grad.to(actual.dtype)),
            torch.autograd.grad(expected, inputs, grad),
            strict=True,
        ):
            assert_same(one / scale, other / scale, dtype)

    return check
