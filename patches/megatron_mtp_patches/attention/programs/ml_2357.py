"""Attention of a sequence of two documents of 8 tokens with the mask that --reset-attention-mask makes: the part that
the tokens of the second document take from it. Queries and keys are zero, so a token weighs all that it sees alike.
"""

from ...defects.labs.lab import LENGTH, make_config, start

NEEDS = ("transformer-engine",)
DOCUMENT, END_OF_DOCUMENT = LENGTH // 2, 1


def reproduce():
    import torch
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    start()
    ids = torch.zeros(LENGTH, dtype=torch.long)
    ids[DOCUMENT - 1] = END_OF_DOCUMENT
    mask, *_ = _get_ltor_masks_and_position_ids(ids, END_OF_DOCUMENT, False, True, False, True)
    config = make_config(hidden_size=32, bf16=True, params_dtype=torch.bfloat16)
    attention = TEDotProductAttention(config, 1, AttnMaskType.causal, "self")
    zeros = torch.zeros(LENGTH, 1, 4, 8).bfloat16()
    is_in_second = zeros.clone()
    is_in_second[DOCUMENT:] = 1
    output = attention(zeros, zeros, is_in_second, mask.unsqueeze(0), AttnMaskType.causal)
    return 1.0, float(output[DOCUMENT:].float().mean())
