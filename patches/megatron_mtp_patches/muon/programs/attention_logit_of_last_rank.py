"""The maximum of the attention logits that the last of two tensor-parallel ranks logs, where the heads of the first one
have logits up to 7, and those of the last one up to 2.
"""

from ...defects.labs.lab import gather, start
from ...defects.labs.qk_clip_lab import clip, make_clipping_model, set_largest_logits

RANKS = 2


def reproduce():
    import torch

    start(tensor_model_parallel_size=2)
    model = make_clipping_model(tensor_model_parallel_size=2)
    set_largest_logits(model, *([7.0, 1.0] if torch.distributed.get_rank() == 0 else [2.0, 1.0]))
    return 7.0, gather(clip(model, log_max_only=True))[-1]
