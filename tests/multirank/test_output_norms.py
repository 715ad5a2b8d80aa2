"""Without sequence parallelism, too, the output norm of GatedDeltaNet gets the gradient of all heads."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]


@pytest.fixture
def reduced(parallel, rank):
    """reduced(**settings): the gradients of a layer's weights, which are 1 on the first rank and 2 on the second."""

    def run(has_gradient=True, **settings):
        parallel(tensor_model_parallel_size=2)
        config = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=2, tensor_model_parallel_size=2, **settings
        )
        layer = torch.nn.Module()
        for name in ("out_norm", "out_proj"):
            setattr(layer, name, torch.nn.Linear(2, 2, bias=False))
            weight = getattr(layer, name).weight
            weight.main_grad = torch.full((2, 2), rank + 1.0) if has_gradient else None
            weight.sequence_parallel = name == "out_norm"
        model = torch.nn.Module()
        model.layer, model.ddp_config = layer, SimpleNamespace(use_megatron_fsdp=False)
        _allreduce_non_tensor_model_parallel_grads([model], config)
        assert not hasattr(layer.out_norm.weight, "average_gradients_across_tp_domain")
        return [
            weight.main_grad if weight.main_grad is None else weight.main_grad.tolist() for weight in layer.parameters()
        ]

    return run


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_the_gradients_of_output_norms_are_added_up(reduced, rank, is_sequence_parallel):
    norm, projection = reduced(sequence_parallel=is_sequence_parallel)
    assert (norm, projection) == ([[3.0] * 2] * 2, [[rank + 1.0] * 2] * 2)


def test_a_weight_without_gradient_is_left_out(reduced):
    assert reduced(has_gradient=False) == [None, None]
