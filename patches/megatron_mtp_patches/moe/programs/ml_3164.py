"""The gradient norm of a GPT with two experts, one on each of two expert-parallel ranks, with
--overlap-moe-expert-parallel-comm. It is to be that without the overlap.
"""

from ...defects.labs.lab import norm, tokens
from ...defects.labs.moe_lab import make_overlapping_gpt, run_overlapping

RANKS = 2
NEEDS = ("transformer-engine",)
EXPECTED = "gradients"


def reproduce():
    model = make_overlapping_gpt(num_moe_experts=2)
    ids, positions = tokens()
    labels = ids.roll(-1, 1)

    def take_gradient():
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        model.zero_grad()
        return norm(*gradients)

    model(ids, positions, None, labels=labels).sum().backward()
    expected = take_gradient()
    run_overlapping(model, ids, positions, gradient=1.0, labels=labels)
    return expected, take_gradient()
