"""The cosine of two gradients of a router from the probabilities that Megatron permutes, with `sinkhorn` and one
expert for each token: that with torch.mm, and that with a product that stands in for TransformerEngine's kernel. As the
kernel does, it reads its operands in the order in which they lie in memory, whatever their strides.
"""

import torch

from ...defects.labs.lab import LENGTH, make_generator, start
from ...defects.labs.moe_lab import make_router, router_inputs

ASSUMES = "te_general_gemm reads its operands in the order in which they lie in memory"


def multiply_in_memory_order(A, B, out_dtype, layout, bias=None, grad=False):
    """The product of te_general_gemm, whose matrices are column-major: op(B) @ op(A), in a list."""
    a, b = (matrix.as_strided(matrix.shape, (matrix.shape[1], 1)) for matrix in (A, B))
    return [((b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)).to(out_dtype)]


def gradient_with(product):
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = product
    router = make_router(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)
    hidden_states, _ = router_inputs(0, 1, False)
    probs, routing_map = router(hidden_states)
    tokens = hidden_states.flatten(0, 1)
    permuted_probs = moe_utils.permute(tokens, routing_map, probs=probs, num_out_tokens=len(tokens))[1]
    (permuted_probs * torch.randn(len(tokens), generator=make_generator(LENGTH))).sum().backward()
    return router.weight.grad.flatten()


def reproduce():
    start()
    gradients = gradient_with(None), gradient_with(multiply_in_memory_order)
    return 1.0, float(torch.cosine_similarity(*gradients, dim=0))
