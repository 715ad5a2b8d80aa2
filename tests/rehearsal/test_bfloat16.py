"""Products of bf16 matrices are those of fp32, rounded once."""

import time

import pytest
import torch

pytestmark = pytest.mark.forked("torch")
SIZES = [pytest.param((8, 5, 7), id="small"), pytest.param((64, 96, 80), id="large")]


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().requires_grad_()


def both(function, *tensors):
    """[result, gradient of each tensor] of bf16 tensors, and of the same numbers in fp32."""
    results_of_both = []
    for copies in ([one.detach() for one in tensors], [one.detach().float() for one in tensors]):
        result = function(*(one.requires_grad_() for one in copies))
        result.backward(torch.ones_like(result))
        results_of_both.append([result.detach(), *(one.grad for one in copies)])
    return results_of_both


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["matmul", "linear", "bmm", "baddbmm"])
def test_products_are_those_of_fp32(name, size):
    rows, inner, columns = size
    function, shapes = {
        "matmul": (torch.matmul, [(rows, inner), (inner, columns)]),
        "linear": (torch.nn.functional.linear, [(2, rows, inner), (columns, inner), (columns,)]),
        "bmm": (torch.bmm, [(2, rows, inner), (2, inner, columns)]),
        "baddbmm": (
            lambda *tensors: torch.baddbmm(*tensors, beta=0.5, alpha=2.0),
            [(2, rows, columns), (2, rows, inner), (2, inner, columns)],
        ),
    }[name]
    narrow, wide = both(function, *(random(*shape) for shape in shapes))
    for one, exact in zip(narrow, wide, strict=True):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one, exact.bfloat16(), rtol=2**-7, atol=2**-6)


def test_a_large_product_takes_about_as_long_as_in_fp32():
    """Without the layer 40 times as long on a CPU that has no instructions for bf16."""

    def seconds(matrix):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        return time.perf_counter() - start

    narrow, wide = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(256, 256)
    assert min(seconds(narrow) for _ in range(5)) < 8 * min(seconds(wide) for _ in range(5))
