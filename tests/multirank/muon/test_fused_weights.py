"""Each matrix of a fused weight is orthogonalized alone, also where its rows, or the weights, lie on several ranks."""

import pytest
from megatron.core.optimizer import OptimizerConfig

from tests.trainings.muon import HAS, SHARDED, SPLITS, assert_split, make_model, needs_muon

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("split-fused-weights-for-muon"),
    pytest.mark.ranks(2),
    needs_muon,
]
BF16 = {"bf16": True, "tolerance": 1e-2}
needs_sharding = pytest.mark.skipif(
    "use_layer_wise_distributed_optimizer" not in OptimizerConfig.__dataclass_fields__,
    reason="Megatron has no Muon with the distributed optimizer up to 0.17",
)


@pytest.fixture
def make(parallel):
    def build(kind, tensor=1, **settings):
        parallel(tensor_model_parallel_size=tensor)
        return make_model(kind, tensor, **settings)

    return build


@pytest.mark.parametrize("kind", ["dense", "multi-latent attention", "grouped experts", "GatedDeltaNet"])
def test_the_rows_of_tensor_parallel_ranks(make, kind):
    assert_split(make(kind, 2), HAS[kind], muon_tp_mode="duplicated")


@pytest.mark.parametrize("mode", ["blockwise", "distributed"])
@pytest.mark.parametrize("kind", ["dense", "GatedDeltaNet"])
def test_other_ways_to_gather_them(make, kind, mode):
    assert_split(make(kind, 2), HAS[kind], muon_tp_mode=mode)


@pytest.mark.parametrize("name", ["muon", "dist_muon", pytest.param(SHARDED, marks=needs_sharding)])
def test_the_weights_of_data_parallel_ranks(make, name):
    assert_split(make("dense"), SPLITS[:2], name=name, **BF16)


@needs_sharding  # up to 0.17 Megatron refuses fewer query groups than ranks
def test_whole_heads_of_a_query_group_on_two_ranks(make):
    assert_split(make("dense", 2, num_query_groups=1), SPLITS[:2])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "kind, name",
    [
        ("dense", "muon"),
        ("multi-latent attention", "dist_muon"),
        ("grouped experts", "dist_muon"),
        pytest.param("dense", SHARDED, marks=needs_sharding),
    ],
)
def test_rows_and_weights_of_four_ranks(make, kind, name):
    assert_split(make(kind, 2), HAS[kind], name=name, muon_tp_mode="duplicated", **BF16)
