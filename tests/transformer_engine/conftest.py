"""TransformerEngine's Python over the kernels that a rehearsal stands in for, against plain torch."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def assert_same():
    """assert_same(found, expected, dtype): within the rounding of that dtype."""

    def check(found, expected, dtype=torch.float32):
        torch.testing.assert_close(found.float(), expected.float(), **TOLERANCE[dtype])

    return check


@pytest.fixture
def assert_same_gradients(assert_same):
    """assert_same_gradients(found, expected, inputs, dtype, scale): the gradients of both outputs at `inputs`."""

    def check(found, expected, inputs, dtype=torch.float32, scale=1.0):
        grad = torch.randn_like(expected)
        for one, other in zip(
            torch.autograd.grad(found, inputs, grad.to(found.dtype)),
            torch.autograd.grad(expected, inputs, grad),
            strict=True,
        ):
            assert_same(one / scale, other / scale, dtype)

    return check
