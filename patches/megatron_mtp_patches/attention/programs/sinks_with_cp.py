"""Attention with learnable sinks over a sequence that two context-parallel ranks share (--cp-comm-type a2a): the norm
of the sinks' gradient, added up over the ranks. It is that of the whole sequence on one rank.
"""

from ...defects.labs.lab import LENGTH, gather, make_config, make_generator, norm, start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    import torch
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    start(context_parallel_size=2)
    rank = torch.distributed.get_rank()
    generator = make_generator(3)
    whole = [torch.randn(LENGTH, 1, 4, 8, generator=generator).bfloat16() for _ in range(4)]

    def gradient_of_sinks(ranks):
        settings = {"context_parallel_size": ranks, "softmax_type": "learnable"}
        config = make_config(hidden_size=32, bf16=True, params_dtype=torch.bfloat16, **settings)
        attention = TEDotProductAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type="a2a")
        torch.nn.init.zeros_(attention.softmax_offset)  # TransformerEngine 2.12 leaves them as they are in memory
        chunks = [tensor.chunk(2 * ranks) for tensor in whole]
        parts = [torch.cat((one[rank], one[-1 - rank])) if ranks > 1 else torch.cat(one) for one in chunks]
        query, key, value, weights = parts
        output = attention(query, key, value, None, AttnMaskType.causal)
        (output.float() * weights.flatten(2).float()).sum().backward()
        return attention.softmax_offset.grad

    expected = gradient_of_sinks(1)
    return norm(expected), norm(sum(gather(gradient_of_sinks(2))))
