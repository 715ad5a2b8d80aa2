"""The gradients of a router do not depend on how that of its logits lies in memory."""

import pytest
import torch
from megatron_mtp_patches.moe.programs.transposed_router_gradients import multiply_in_memory_order

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("make-router-gradients-contiguous")]

TOKENS, SAMPLES, EXPERTS, WIDTH = 6, 2, 4, 8


def test_transposed_gradient_of_logits_is_read_by_token_and_expert(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "te_general_gemm", multiply_in_memory_order)
    generator = torch.Generator().manual_seed(1)
    hidden_states = torch.randn(TOKENS, SAMPLES, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(EXPERTS, WIDTH, generator=generator, requires_grad=True)
    gradient = torch.randn(EXPERTS, TOKENS * SAMPLES, generator=generator).t()

    logits = moe_utils.router_gating_linear(hidden_states, weight, None, torch.float32)
    logits.backward(gradient.view(logits.shape))

    torch.testing.assert_close(weight.grad, gradient.t() @ hidden_states.detach().flatten(0, 1))
    torch.testing.assert_close(hidden_states.grad.flatten(0, 1), gradient @ weight.detach())
