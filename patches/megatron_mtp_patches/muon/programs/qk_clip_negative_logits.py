"""A QK clip where one head is over the threshold and another one has a negative largest logit: how many entries of the
weight are NaN.
"""

from ...defects.labs.lab import start
from ...defects.labs.qk_clip_lab import attention_layers, clip, make_clipping_model, set_largest_logits


def reproduce():
    start()
    model = make_clipping_model(num_layers=1)
    set_largest_logits(model, 2.0, -1.0, 0.5, 0.5)
    clip(model)
    (layer,) = attention_layers(model)
    return 0, int(layer.linear_qkv.weight.isnan().sum())
