"""The choices that a router with an expert bias counts: of 16 tokens 5 are padding, and each of the others chooses two
experts.
"""

import torch

from ...defects.labs.lab import LENGTH, start
from ...defects.labs.moe_lab import WIDTH, make_router

PADDING = 5
EXPECTED = 2 * (LENGTH - PADDING)


def reproduce():
    start()
    router = make_router(moe_router_topk=2, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    is_padding = torch.arange(LENGTH).unsqueeze(1) >= LENGTH - PADDING
    router(torch.randn(LENGTH, 1, WIDTH), is_padding)
    return EXPECTED, int(router.local_tokens_per_expert.sum())
