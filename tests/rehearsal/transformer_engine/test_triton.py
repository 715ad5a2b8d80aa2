"""Triton's interpreter, in which a rehearsal runs Triton kernels, in each dtype against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformer_engine.pytorch")
triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.forked("torch")

SIZE = 16
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@triton.jit
def _calculate(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr, OPERATION: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    if OPERATION == "add":
        result = x + y
    elif OPERATION == "negate":
        result = -x
    elif OPERATION == "where greater":
        result = tl.where(x > y, x, y - x)
    elif OPERATION == "round fp32":
        result = (x.to(tl.float32) * 1.01).to(x.dtype)
    elif OPERATION == "from integers":
        result = at.to(x.dtype) + x
    elif OPERATION == "greatest":
        result = x - tl.max(x, 0)
    elif OPERATION == "index of the greatest":
        result = x + tl.argmax(x, 0).to(x.dtype)
    elif OPERATION == "sum":
        result = x - tl.sum(x, 0)
    elif OPERATION == "sums so far":
        result = tl.cumsum(x, 0)
    elif OPERATION == "products so far":
        result = tl.cumprod(x, 0)
    else:
        result = (x - tl.sum(x.to(tl.float32), 0)).to(x.dtype)
    tl.store(out_ptr + at, result)


EXPECTED = {
    "add": lambda x, y: x + y,
    "negate": lambda x, y: -x,
    "where greater": lambda x, y: torch.where(x > y, x, y - x),
    "round fp32": lambda x, y: (x.float() * 1.01).to(x.dtype),
    "from integers": lambda x, y: torch.arange(SIZE).to(x.dtype) + x,
    "greatest": lambda x, y: x - x.max(),
    "index of the greatest": lambda x, y: x + x.argmax().to(x.dtype),
    "sum": lambda x, y: x - x.float().sum().to(x.dtype),
    "sums so far": lambda x, y: x.float().cumsum(0).to(x.dtype),
    "products so far": lambda x, y: x.float().cumprod(0).to(x.dtype),
    "sum in fp32": lambda x, y: (x - x.float().sum()).to(x.dtype),
}
ADDS_UP = ("sum", "sums so far", "products so far", "sum in fp32")


@each_dtype
@pytest.mark.parametrize("operation", EXPECTED)
def test_operations(operation, dtype):
    x, y = torch.randn(SIZE).to(dtype), torch.randn(SIZE).to(dtype)
    actual = torch.empty_like(x)
    _calculate[(1,)](x, y, actual, SIZE=SIZE, OPERATION=operation)
    expected = EXPECTED[operation](x, y)
    eps = torch.finfo(dtype).eps if operation in ADDS_UP else 0  # torch adds up in another order
    atol = 8 * eps if operation.startswith("sums ") else 0  # one of them is near 0
    torch.testing.assert_close(actual, expected, rtol=2 * eps, atol=atol)


@triton.jit
def _add_number(x_ptr, number):
    x = tl.load(x_ptr)
    x += number
    tl.store(x_ptr, x)


@each_dtype
def test_a_number_is_added_to_one_element(dtype):
    x = torch.tensor([0.25, 0.5], dtype=dtype)
    _add_number[(1,)](x, -1.0)
    assert x.tolist() == [-0.75, 0.5]


@triton.jit
def _product(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@each_dtype
def test_products_of_matrices(dtype):
    x, y = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
    actual = torch.empty(SIZE, SIZE)
    _product[(1,)](x, y, actual, SIZE=SIZE)
    torch.testing.assert_close(actual, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _add_atomically(x_ptr):
    tl.atomic_add(x_ptr, tl.load(x_ptr))


def test_an_atomic_addition_in_bf16_is_refused():
    with pytest.raises(Exception, match="create_atomic_rmw: a rehearsal on the CPU cannot do this in bf16"):
        _add_atomically[(1,)](torch.ones(1, dtype=torch.bfloat16))


@each_dtype
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [False, True])
def test_cross_entropy(dtype, smoothing, ignored):
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    logits = torch.randn(16, 2, 50).to(dtype)
    target = torch.randint(0, 50, (16, 2))
    if ignored:
        target[3] = -100
    weights = torch.rand(16, 2)
    actual, expected = (logits.clone().requires_grad_() for _ in range(2))
    loss = parallel_cross_entropy(actual * 1, target, smoothing, False, None)
    loss.backward(weights)
    expected_loss = F.cross_entropy(
        expected.float().view(-1, 50), target.view(-1), reduction="none", label_smoothing=smoothing
    )
    expected_loss.backward(weights.view(-1))
    torch.testing.assert_close(loss.view(-1), expected_loss, rtol=1e-5, atol=1e-5)
    # the kernel rounds the softmax, the difference and the product to the dtype of the logits
    torch.testing.assert_close(actual.grad, expected.grad, rtol=3 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
