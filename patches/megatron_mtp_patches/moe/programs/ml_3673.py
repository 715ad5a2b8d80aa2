"""Eight tokens with a sigmoid and logits in bf16, 5.03125 for one expert and 5 for the seven others: how many of them
choose this expert.
"""

EXPERTS = 8
WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    is_best = torch.eye(EXPERTS)  # another one for each token
    logits = (5 + is_best / 32).bfloat16()
    _, routing_map = topk_routing_with_score_function(logits, topk=1, score_function="sigmoid")
    return EXPERTS, int((routing_map * is_best).sum())
