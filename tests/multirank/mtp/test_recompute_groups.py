"""The checkpoint of an MTP layer in fp8 puts the saved hidden states together from the ranks of the layer's group."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches import rehearsal

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("recompute-quantized-mtp-heads"),
    pytest.mark.ranks(4),
    pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed"),
]


def test_hidden_states_are_recomputed_from_the_ranks_that_have_them(parallel, rank, monkeypatch, from_all_ranks):
    """Megatron's tensor-parallel groups are (0, 1) and (2, 3), those of the layer (0, 2) and (1, 3)."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer import multi_token_prediction as mtp

    parallel(tensor_model_parallel_size=2)
    monkeypatch.setattr(mtp, "get_fp8_context", lambda config: nullcontext())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        distribute_saved_activations=True,
    )
    config.fp8 = "hybrid"
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    weight = torch.ones(8, requires_grad=True)

    def layer_forward(hidden_states, decoder_input, **_):
        return hidden_states * decoder_input * weight

    layer = SimpleNamespace(config=config, tp_group=groups[rank % 2], _proj_and_transformer_layer=layer_forward)
    hidden = torch.arange(32.0).view(4, 1, 8) + 100.0 * (rank % 2)  # the same on the ranks of a group
    expected = hidden.sum(dim=(0, 1))
    checkpoint = mtp.MultiTokenPredictionLayer._checkpointed_forward
    function = [layer_forward] if "forward_func" in inspect.signature(checkpoint).parameters else []
    output = checkpoint(
        layer,
        *function,
        hidden_states=hidden.clone().requires_grad_(),
        decoder_input=torch.ones(4, 1, 8),
        attention_mask=None,
    )
    output.sum().backward()
    assert all(from_all_ranks(torch.equal(weight.grad, expected)))
