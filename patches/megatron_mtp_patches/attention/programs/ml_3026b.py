"""Sparse attention: a query of the indexer, [0, 1, 0, 0], with the rotary embedding of position 1. DeepSeek's indexer
rotates the halves of a query.
"""

import math

from ...defects.labs.lab import make_sparse_gpt, start

NEEDS = ("transformer-engine",)


def reproduce():
    import torch

    start()
    model = make_sparse_gpt(dsa_indexer_head_dim=4)
    indexer = model.decoder.layers[0].self_attention.core_attention.indexer
    queries = torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat(2, 1, 1, 1)
    rotated = indexer._apply_rope(queries, indexer.rotary_pos_emb(2), 1.0)[1].flatten().tolist()
    angle = model.config.rotary_base**-0.5  # the second of two frequencies
    return [0.0, math.cos(angle), 0.0, math.sin(angle)], rotated
