"""Muon's update of a QKV weight with --attention-output-gate: the norms of its rows of queries, gates, keys and values.
Each of these should be orthogonalized alone.
"""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, norm, start

HEADS, GROUPS, CHANNELS = 4, 2, 4
NEEDS = ("Muon",)


def reproduce():
    import torch

    start()
    config = make_config(
        num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=CHANNELS, attention_output_gate=True
    )
    model = make_ddp(config, make_gpt(config))
    weight = model.module.decoder.layers[0].self_attention.linear_qkv.weight
    muon = find_muon(make_optimizer(model, optimizer="muon"))
    gradient = torch.randn(weight.shape)
    alone = [muon.scaled_orthogonalize_fn(piece, None) for piece in split(gradient)]
    return [norm(piece) for piece in alone], [norm(piece) for piece in split(muon.orthogonalize(weight, gradient))]


def split(rows):
    """The rows of all queries, gates, keys and values, which lie together for each query group."""
    query = HEADS // GROUPS * CHANNELS
    pieces = rows.view(GROUPS, -1, rows.size(1)).split([query, query, CHANNELS, CHANNELS], dim=1)
    return [piece.reshape(-1, rows.size(1)) for piece in pieces]


def find_muon(optimizer):
    """The optimizer of the matrices in the chain that Megatron makes."""
    chain = [one.optimizer for one in optimizer.chained_optimizers]
    return next(one for one in chain if hasattr(one, "scaled_orthogonalize_fn"))
