"""Sparse attention with --qk-layernorm: the root mean square of the latent query that the indexer gets."""

from ...defects.labs.lab import make_sparse_gpt, start, tokens

NEEDS = ("transformer-engine",)


def reproduce():
    start()
    model = make_sparse_gpt(qk_layernorm=True)
    queries = []
    indexer = model.decoder.layers[0].self_attention.core_attention.indexer
    indexer.linear_wq_b.register_forward_pre_hook(lambda _, inputs: queries.append(inputs[0]))
    model(*tokens(), None)
    return 1.0, round(float(queries[0].square().mean().sqrt()), 2)
