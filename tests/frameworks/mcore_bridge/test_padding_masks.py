"""The padding mask of mcore-bridge's hybrid models, which mends the counting of tokens by itself."""

import pytest

pytest.importorskip("mcore_bridge", reason="mcore-bridge is not installed")

from mcore_bridge.model.gpts.nemotron_h import NemotronHLoader
from mcore_bridge.model.hybrid_model import HybridModel
from megatron.core.transformer.moe.router import TopKRouter

from .conftest import BATCH, LENGTH

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(1)]

PADDING, TOP = 5, 2


def test_the_load_of_experts_counts_no_padding_of_samples_that_are_not_packed(make_config, batch):
    experts = {"num_moe_experts": 4, "moe_router_topk": TOP, "moe_ffn_hidden_size": 16, "add_bias_linear": False}
    experts |= {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none"}
    experts |= {"moe_router_enable_expert_bias": True, "moe_token_dispatcher_type": "alltoall"}
    loader = NemotronHLoader.__new__(NemotronHLoader)  # which otherwise reads a checkpoint
    loader.config = make_config(hybrid_layer_pattern="*E", is_hybrid_model=True, moe_grouped_gemm=False, **experts)
    model = HybridModel(loader.config, loader.get_transformer_layer_spec())
    attention_mask = batch["attention_mask"].repeat(BATCH, 1, 1, 1)
    attention_mask[1, :, :, -PADDING:] = attention_mask[1, :, -PADDING:] = True
    model(**{**batch, "attention_mask": attention_mask})
    (router,) = (module for module in model.modules() if isinstance(module, TopKRouter))
    assert router.local_tokens_per_expert.sum() == TOP * (BATCH * LENGTH - PADDING)
