"""Fused experts add up gradients where Megatron-FSDP leaves them whole. Their steps need a GPU: none is run."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from megatron_overrides.fsdp.gradient_sums import add_gradients_of_backward_passes

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("add-fsdp-gradients-of-all-microbatches")]


class Gathering(dict):
    """A call of all_gather_and_wait_parameters_ready, after which backward passes overwrite `main_grad`."""

    def __init__(self, strategy, params):
        super().__init__(params=params)
        self.instance = SimpleNamespace(data_parallel_sharding_strategy=strategy)

    def proceed(self):
        for param in self["params"]:
            param.overwrite_main_grad = True


@pytest.mark.parametrize("strategy, overwrites", [("no_shard", False), ("optim", False), ("optim_grads", True)])
def test_before_fused_experts_run_the_strategy_still_decides(strategy, overwrites):
    if not hasattr(TEGroupedMLP, "_ensure_main_grad_for_fused_impl"):
        pytest.skip("before 0.19 fused experts have no buffer of Megatron-FSDP")
    experts = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.linear_fc1, experts.linear_fc2 = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for linear in experts.children():
        linear.fuse_wgrad_accumulation = True
    for param in experts.parameters():
        param.get_main_grad = lambda param=param: torch.zeros_like(param)
    add_gradients_of_backward_passes(Gathering(strategy, list(experts.parameters())))
    experts._ensure_main_grad_for_fused_impl()
    assert {param.overwrite_main_grad for param in experts.parameters()} == {overwrites}
    assert all(param.main_grad.shape == param.shape for param in experts.parameters())
