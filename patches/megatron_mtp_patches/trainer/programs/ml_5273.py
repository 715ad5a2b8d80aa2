"""MLA with a fused down projection computes the weight gradients that its backward pass has left out."""

from ...defects.labs.lab import make_fused_mla, start

NEEDS = ("transformer-engine",)
EXPECTED = "weight gradients"


def reproduce():
    start()
    attention, hidden_states = make_fused_mla(delays_weight_gradients=True)
    output, _ = attention(hidden_states, attention_mask=None)
    output.sum().backward()
    attention.backward_dw()
    return EXPECTED, EXPECTED
