"""Gradients that Megatron-FSDP leaves whole are added up. The steps of fused experts need a GPU: none is run."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron_mtp_patches import rehearsal
from megatron_mtp_patches.fsdp.programs import fsdp_recomputed_repeated_head

from megatron_overrides.fsdp.gradient_sums import add_gradients_of_backward_passes

pytestmark = pytest.mark.forked("patched")


class Gathering(dict):
    """A call of all_gather_and_wait_parameters_ready, after which backward passes overwrite `main_grad`."""

    def __init__(self, strategy, params):
        super().__init__(params=params)
        self.instance = SimpleNamespace(data_parallel_sharding_strategy=strategy)

    def proceed(self):
        for param in self["params"]:
            param.overwrite_main_grad = True


@pytest.mark.guards("add-fsdp-gradients-of-all-microbatches")
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


@pytest.mark.guards("add-fsdp-gradients-of-single-replicas")
@pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed")
def test_depths_that_are_recomputed_one_by_one_are_added_up_on_one_rank():
    pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
    if not hasattr(TransformerConfig, "mtp_use_repeated_layer"):
        pytest.skip("0.16 repeats no MTP layer")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()  # the lab makes its own
    right, seen = fsdp_recomputed_repeated_head.reproduce()
    assert seen == pytest.approx(right, rel=1e-5)
