"""Without sequence parallelism, too, the output norm of GatedDeltaNet gets the gradient of all heads."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("sum-gradients-of-output-norms"), pytest.mark.ranks(2)]


class GatedDeltaNet(torch.nn.Module):
    """Has the weights that matter here."""


class Qwen3GatedDeltaNet(GatedDeltaNet):
    """As a framework derives its own layer."""


class _GDNBase(torch.nn.Module):
    """As main has it."""


class GatedDeltaNet2(_GDNBase):
    """As main derives a second kind of layer, which is no GatedDeltaNet."""


@pytest.fixture
def reduced(parallel, rank):
    """reduced(**settings): the gradients of a layer's weights, which are 1 on the first rank and 2 on the second."""

    def run(has_gradient=True, kind=GatedDeltaNet, **settings):
        parallel(tensor_model_parallel_size=2)
        config = TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=2, tensor_model_parallel_size=2, **settings
        )
        layer = kind()
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


@pytest.mark.parametrize(
    "kind, is_sequence_parallel",
    [(GatedDeltaNet, False), (GatedDeltaNet, True), (Qwen3GatedDeltaNet, False), (GatedDeltaNet2, False)],
)
def test_the_gradients_of_output_norms_are_added_up(reduced, rank, kind, is_sequence_parallel):
    norm, projection = reduced(kind=kind, sequence_parallel=is_sequence_parallel)
    assert (norm, projection) == ([[3.0] * 2] * 2, [[rank + 1.0] * 2] * 2)


def test_a_weight_without_gradient_is_left_out(reduced):
    assert reduced(has_gradient=False) == [None, None]


def test_a_norm_of_that_name_in_another_module_is_left_alone(reduced, rank):
    """Its copies have the same gradient on each rank."""
    assert reduced(kind=torch.nn.Module) == [[[rank + 1.0] * 2] * 2] * 2
