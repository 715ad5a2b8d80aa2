"""A sequence of two documents of 8 tokens on two context-parallel ranks: the positions in their documents with which
rotary embeddings rotate the tokens.
"""

from ...defects.labs.lab import gather, make_config, start

RANKS, DOCUMENT = 2, 8
WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.utils import get_batch_on_this_cp_rank

    start(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    ends = torch.tensor([0, DOCUMENT, 2 * DOCUMENT], dtype=torch.int32)
    batch = {"tokens": torch.arange(2 * DOCUMENT).unsqueeze(0), "cu_seqlens": ends}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group, use_per_sequence_balancing=True)
    angles = torch.arange(DOCUMENT).view(-1, 1, 1, 1) / 10 * torch.ones(2)
    queries = torch.tensor([1.0, 0.0]).expand(DOCUMENT, 1, 2)
    rotated = apply_rotary_pos_emb(queries, angles, make_config(context_parallel_size=2), ends, cp_group=group)
    positions = (rotated[:, 0, 0].acos() * 10).round().int().tolist()
    tokens = batch["tokens"].flatten().tolist()
    pairs = sorted(pair for part in gather(list(zip(tokens, positions, strict=True))) for pair in part)
    return [token % DOCUMENT for token, _ in pairs], [position for _, position in pairs]
