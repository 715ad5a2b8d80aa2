"""How many choices a router with an expert bias counts: each of 16 tokens chooses two experts, and 5 are padding."""

import torch

from ..lab import LENGTH, start
from ..moe_lab import WIDTH, make_router

PADDING = 5


def reproduce():
    start()
    router = make_router(moe_router_topk=2, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    is_padding = torch.arange(LENGTH).unsqueeze(1) >= LENGTH - PADDING
    router(torch.randn(LENGTH, 1, WIDTH), is_padding)
    return 2 * (LENGTH - PADDING), int(router.local_tokens_per_expert.sum())
