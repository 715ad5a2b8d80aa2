"""Permutation of tokens: TransformerEngine's Triton kernels, interpreted and replaced by torch."""

import inspect

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = pytest.mark.forked("torch")
TOKENS, EXPERTS, TOP, WIDTH = 12, 4, 2, 8


def test_permutation_by_an_index_map():
    chosen = torch.rand(TOKENS, EXPERTS).topk(TOP).indices.int()
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    permuted, rows = te.moe_permute(x, chosen, TOKENS * TOP, map_type="index")
    torch.testing.assert_close(permuted, x[chosen.reshape(-1).argsort(stable=True) // TOP])
    weights = torch.rand(TOKENS, TOP, requires_grad=True)
    back = te.moe_unpermute(permuted, rows, weights, map_type="index")
    torch.testing.assert_close(back, x * weights.sum(1, keepdim=True))
    back.sum().backward()
    torch.testing.assert_close(weights.grad, x.detach().sum(1, keepdim=True).expand(TOKENS, TOP))
    torch.testing.assert_close(x.grad, weights.detach().sum(1, keepdim=True).expand(TOKENS, WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_permutation_in_torch_equals_the_triton_kernels(dtype, assert_same):
    """Compares each function with TransformerEngine's own in Triton's interpreter."""
    import transformer_engine.pytorch.triton.permutation as kernels

    tokens, experts, rows = 6, 3, 10
    mask = (torch.rand(tokens, experts) < 0.6).int()
    mask[4] = 0
    routed = int(mask.sum())
    x, probs = torch.randn(tokens, WIDTH).to(dtype), torch.rand(tokens, experts).to(dtype) * mask

    def both(name, **arguments):
        function = getattr(kernels, name)
        names = inspect.signature(function.__wrapped__).parameters
        arguments = {name: value for name, value in arguments.items() if name in names}
        return function(**arguments), function.__wrapped__(**arguments)

    ours, theirs = both("make_row_id_map", routing_map=mask, num_tokens=tokens, num_experts=experts)
    here = torch.arange(experts) < theirs[:, -1:]
    keep = torch.cat((here, here, torch.ones(tokens, 1, dtype=torch.bool)), 1)
    assert torch.equal(ours[keep], theirs[keep])

    sizes = {"num_tokens": tokens, "num_experts": experts, "hidden_size": WIDTH, "num_out_tokens": routed}
    arguments = {**sizes, "row_id_map": ours, "scale": None, "scale_hidden_dim": 0, "pad_offsets": None}
    for one, other in zip(*both("permute_with_mask_map", inp=x, probs=probs, **arguments), strict=True):
        assert one is other is None or torch.equal(one, other)
    permuted, permuted_probs = torch.randn(routed, WIDTH).to(dtype), torch.rand(routed).to(dtype)
    for merging in (None, probs):
        words = {"inp": permuted, "merging_probs": merging, "permuted_probs": permuted_probs}
        for one, other in zip(*both("unpermute_with_mask_map", **words, **arguments), strict=True):
            assert_same(one, other, dtype)
    words = {"fwd_output_grad": torch.randn(tokens, WIDTH).to(dtype), "fwd_input": permuted, "merging_probs": probs}
    for one, other in zip(*both("unpermute_with_mask_map_bwd_with_merging_probs", **words, **arguments), strict=True):
        assert_same(one, other, dtype)

    split, order = torch.tensor([2, 0, 5, 3]), torch.tensor([2, 0, 3, 1])
    one, other = both("make_chunk_sort_map", split_sizes=split, sorted_indices=order, num_tokens=rows, num_splits=4)
    assert torch.equal(one, other)
    arguments = {"inp": torch.randn(rows, WIDTH).to(dtype), "row_id_map": one, "probs": torch.rand(rows)}
    for forward in (True, False):
        words = {"num_tokens": rows, "hidden_size": WIDTH, "is_forward": forward}
        for actual, expected in zip(*both("sort_chunks_by_map", **arguments, **words), strict=True):
            assert torch.equal(actual, expected)
