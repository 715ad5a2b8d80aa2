"""Muon's update of a fused QKV weight consists of those that query, gate, key and value would get alone."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron_mtp_patches.defects.labs.lab import make_optimizer

from megatron_overrides.norms.optimizer_tree import leaves
from tests.trainings.muon import needs_muon

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("split-gated-qkv-for-muon"), needs_muon]

CHANNELS, HIDDEN = 4, 24
# Query heads and query groups. Without the gate, the rows of the first still divide into three pieces.
DIVIDES, DOES_NOT_DIVIDE = (4, 2), (6, 2)


@pytest.fixture
def make(make_gpt):
    """make(heads, **settings): (Muon as Megatron makes it, the QKV weight of a layer)."""

    def build(heads, gate=True, layer_wise=False, **settings):
        model = make_gpt(
            32,
            8,
            hidden_size=HIDDEN,
            num_attention_heads=heads[0],
            num_query_groups=heads[1],
            kv_channels=CHANNELS,
            attention_output_gate=gate,
            mtp_num_layers=None,
        )
        if settings.get("bf16"):
            model = model.bfloat16()
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        whole = make_optimizer(model, optimizer="dist_muon" if layer_wise else "muon", lr=0.1, **settings)
        inner = next(leaf.optimizer for leaf in leaves(whole) if hasattr(leaf.optimizer, "qkv_split_shapes"))
        return inner, next(p for group in inner.param_groups for p in group["params"] if getattr(p, "is_qkv", False))

    return build


def by_hand(optimizer, weight, heads, gate=True):
    """The pieces of each query group, as attention splits them, orthogonalized over all groups."""
    query = heads[0] // heads[1] * CHANNELS
    sizes = [query] * (2 if gate else 1) + [CHANNELS, CHANNELS]
    pieces = weight.view(heads[1], sum(sizes), HIDDEN).split(sizes, dim=1)
    alone = [optimizer.scaled_orthogonalize_fn(piece.reshape(-1, HIDDEN), None) for piece in pieces]
    return torch.cat([one.view(heads[1], -1, HIDDEN) for one in alone], dim=1).view(weight.shape)


def local_gradient(weight):
    return torch.randn(weight.shape, generator=torch.Generator(weight.device).manual_seed(3), dtype=torch.float32)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"bf16": True, "layer_wise": True}], ids=str)
@pytest.mark.parametrize("heads", [DIVIDES, DOES_NOT_DIVIDE], ids=str)
def test_query_gate_key_and_value_are_orthogonalized_alone(make, heads, settings):
    optimizer, weight = make(heads, **settings)
    gradient = local_gradient(weight)
    assert weight.shape == ((2 * heads[0] + 2 * heads[1]) * CHANNELS, HIDDEN)
    torch.testing.assert_close(optimizer.orthogonalize(weight, gradient), by_hand(optimizer, gradient, heads))


def test_without_a_gate_there_are_three_pieces(make):
    optimizer, weight = make(DIVIDES, gate=False)
    gradient = local_gradient(weight)
    assert torch.equal(optimizer.orthogonalize(weight, gradient), by_hand(optimizer, gradient, DIVIDES, gate=False))


def test_a_weight_that_is_not_split_stays_whole(make):
    optimizer, weight = make(DIVIDES, muon_split_qkv=False)
    gradient = local_gradient(weight)
    assert torch.equal(optimizer.orthogonalize(weight, gradient), optimizer.scaled_orthogonalize_fn(gradient, None))
