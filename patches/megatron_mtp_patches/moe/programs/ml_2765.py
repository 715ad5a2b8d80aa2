"""The part of a token, with a sigmoid and logits in bf16, that an auxiliary loss counts for one of four experts."""

WITHOUT_CUDA = True
LOGITS = (3.0, 1.0, 0.5, -1.0)


def reproduce():
    import torch
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    _, scores = compute_routing_scores_for_aux_loss(torch.tensor([LOGITS], dtype=torch.bfloat16), 2, "sigmoid")
    exact = torch.tensor(LOGITS, dtype=torch.float64).sigmoid()
    return float(exact[0] / exact.sum()), float(scores[0, 0])
