"""A QK clip of grouped-query attention on two tensor-parallel ranks."""

from ...defects.labs.lab import start
from ...defects.labs.qk_clip_lab import clip, make_clipping_model, set_largest_logits

RANKS = 2
EXPECTED = "clipped weights"


def reproduce():
    start(tensor_model_parallel_size=2)
    model = make_clipping_model(num_query_groups=2, tensor_model_parallel_size=2)
    set_largest_logits(model, 2.0, 2.0)
    clip(model)
    return EXPECTED, "clipped weights"
