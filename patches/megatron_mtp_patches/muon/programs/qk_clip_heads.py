"""A QK clip where the largest logit of each head is twice the threshold: the norms of the weights of queries and keys,
as parts of those before it, in a layer of the main model and in an MTP head.
"""

from ...defects.labs.lab import norm, start
from ...defects.labs.qk_clip_lab import attention_layers, clip, make_clipping_model, set_largest_logits

HEADS = 4


def reproduce():
    start()
    model = make_clipping_model(num_layers=1, mtp_num_layers=1)
    before = [norm_of_queries_and_keys(layer) for layer in attention_layers(model)]
    set_largest_logits(model, 2.0, 2.0, 2.0, 2.0)
    clip(model)
    after = [norm_of_queries_and_keys(layer) for layer in attention_layers(model)]
    return [0.5**0.5, 0.5**0.5], [new / old for old, new in zip(before, after, strict=True)]


def norm_of_queries_and_keys(layer):
    """The weight has the rows of query, key and value of each head."""
    weight = layer.linear_qkv.weight.detach()
    return norm(weight.view(HEADS, 3, -1)[:, :2])
