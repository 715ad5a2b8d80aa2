"""Fused experts add up gradients where Megatron-FSDP has decided so. Whole steps are in tests/reproductions."""

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

pytestmark = pytest.mark.forked("patched")


@pytest.mark.parametrize("decided", [False, True, None], ids=["sums", "overwrites", "undecided"])
def test_before_fused_experts_run_nothing_is_decided_again(decided):
    if not hasattr(TEGroupedMLP, "_ensure_main_grad_for_fused_impl"):
        pytest.skip("before 0.19 fused experts have no buffer of Megatron-FSDP")
    experts = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.linear_fc1, experts.linear_fc2 = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for linear in experts.children():
        linear.fuse_wgrad_accumulation = True
    for param in experts.parameters():
        param.get_main_grad = lambda param=param: torch.zeros_like(param)
        if decided is not None:
            param.overwrite_main_grad = decided
    experts._ensure_main_grad_for_fused_impl()
    assert {getattr(param, "overwrite_main_grad", None) for param in experts.parameters()} == {decided}
    assert all(param.main_grad.shape == param.shape for param in experts.parameters())
