"""Routers whose logits have 16 bits score experts in fp32."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("score-experts-in-fp32")]


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_scores_for_auxiliary_losses_are_not_rounded(function):
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, scores = compute_routing_scores_for_aux_loss(logits, 2, function)
    expected = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}[function](logits.float())
    expected = expected / expected.sum(-1, keepdim=True)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=0)
