"""Routes of 64 tokens with `sinkhorn`, whose logits for one expert are 12 below those for the others."""

import torch

from ...defects.labs.lab import make_generator, start

EXPECTED = "routes"
LIMIT = 5.0  # seconds; such routes with logits that are 6 below take 8 rounds


def reproduce():
    from megatron.core.transformer.moe.moe_utils import sinkhorn

    start()
    logits = torch.randn(64, 4, generator=make_generator(0))
    logits[:, 3] -= 12.0
    sinkhorn(logits)
    return EXPECTED, EXPECTED
