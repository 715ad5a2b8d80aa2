"""Fused rotary embeddings of packed sequences with --rotary-interleaved: a head, [1, 2, 3, 4], at position 1 of the
second sequence. A rotation multiplies the complex numbers 1 + 2i and 3 + 4i.
"""

from ...defects.labs.lab import make_config, start

NEEDS = ("transformer-engine",)
LENGTHS = (3, 5)


def reproduce():
    import torch
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    start()
    config = make_config(rotary_interleaved=True, apply_rope_fusion=True)
    frequencies = RotaryEmbedding(4, rotary_percent=1.0, rotary_interleaved=True)(max(LENGTHS))
    heads = torch.arange(1.0, 5.0).expand(sum(LENGTHS), 1, 4).contiguous()
    ends = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    rotated = apply_rotary_pos_emb(heads, frequencies, config, cu_seqlens=ends)[LENGTHS[0] + 1, 0]
    angles = torch.tensor([1.0, 10000**-0.5])
    expected = torch.view_as_complex(heads[0, 0].view(2, 2)) * torch.polar(torch.ones(2), angles)
    return torch.view_as_real(expected).flatten().tolist(), rotated.tolist()
