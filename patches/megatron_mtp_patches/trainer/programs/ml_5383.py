"""MLA with a fused down projection on two tensor-parallel ranks."""

from ...defects.labs.lab import make_fused_mla, start

RANKS = 2
NEEDS = ("transformer-engine",)
EXPECTED = "a forward pass"


def reproduce():
    start(tensor_model_parallel_size=2)
    attention, hidden_states = make_fused_mla(tensor_model_parallel_size=2)
    attention(hidden_states, attention_mask=None)
    return EXPECTED, EXPECTED
