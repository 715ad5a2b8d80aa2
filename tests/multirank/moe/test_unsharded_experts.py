"""Layer-wise optimizers count, train and save experts whose replicas are the tensor-parallel ranks of one model.

Megatron shares no parameter out there, because dense layers have one replica.
"""

import pytest
from megatron.core.optimizer import OptimizerConfig

from tests.trainings.muon import SHARDED, make_model, make_muon, needs_muon

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("count-experts-in-grad-norm"),
    pytest.mark.ranks(2),
    needs_muon,
]
needs_sharding = pytest.mark.skipif(
    "use_layer_wise_distributed_optimizer" not in OptimizerConfig.__dataclass_fields__,
    reason="Megatron has no Muon with the distributed optimizer up to 0.17",
)
SIZES = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
SUM = 3.0  # of the gradients of both ranks, which are 1 and 2


@pytest.fixture(params=["dist_muon", pytest.param(SHARDED, marks=needs_sharding)])
def make(parallel, request):
    """make(): a layer-wise optimizer, its model in DDP, and the experts of the main model and of the MTP head."""
    pytest.importorskip("transformer_engine", reason="grouped experts are TransformerEngine's")

    def build():
        parallel(**SIZES)
        net = make_model("grouped experts", 2, expert_tensor_parallel_size=1)
        for name, param in net.named_parameters():
            if name.startswith("mtp."):
                param.grad_norm_group = "mtp"
        optimizer, model = make_muon(net, request.param, bf16=True, clip_grad=1.0, log_num_zeros_in_grad=True)
        experts = {name: param for name, param in model.named_parameters() if ".experts." in name}
        heads = [param for name, param in experts.items() if "mtp." in name]
        return optimizer, model, [param for name, param in experts.items() if "mtp." not in name], heads

    return build


@pytest.fixture
def take_step(rank):
    """take_step(optimizer, model, experts): what a step reports where only the experts have a gradient."""

    def step(optimizer, model, experts):
        model.zero_grad_buffer()
        for param in experts:
            param.main_grad.fill_(1.0 + rank)
        model.finish_grad_sync()
        return optimizer.step()

    return step


def size_of(params):
    return sum(param.numel() for param in params)


def state_of(optimizer, model, is_loading=False):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "distrib_optim_sharding_type": "dp_reshardable"}
    weights = model.sharded_state_dict(metadata=metadata)
    return {"optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)}


def test_norms_and_zeros_count_each_expert_once(make, take_step):
    optimizer, model, experts, heads = make()
    _, _, zeros_of_all = take_step(optimizer, model, [])
    updated, norm, zeros = take_step(optimizer, model, [*experts, *heads])
    assert updated
    assert float(norm) == pytest.approx(SUM * size_of(experts) ** 0.5, rel=1e-5)
    assert float(optimizer.grad_norms_by_group["mtp"]) == pytest.approx(SUM * size_of(heads) ** 0.5, rel=1e-5)
    assert zeros_of_all - zeros == size_of([*experts, *heads])


def test_both_ranks_get_the_experts_that_either_updates(make, take_step, from_all_ranks):
    optimizer, model, experts, heads = make()
    take_step(optimizer, model, [*experts, *heads])
    sums = from_all_ranks([float(param.double().sum()) for param in (*experts, *heads)])
    assert sums[0] == sums[1]
    assert all(sums[0])


def test_a_stage_without_experts_trains(parallel, take_step):
    parallel(**SIZES)
    optimizer, model = make_muon(make_model("dense", 2), "dist_muon", bf16=True)
    updated, *_ = take_step(optimizer, model, [])
    assert updated


def test_a_resumed_training_goes_on_as_one_that_was_not_interrupted(make, take_step, checkpoint):
    from megatron.core import dist_checkpointing

    optimizer, model, experts, heads = make()
    take_step(optimizer, model, [*experts, *heads])
    dist_checkpointing.save(state_of(optimizer, model), checkpoint)
    resumed, copy, *_ = make()
    for old, new in zip(model.parameters(), copy.parameters(), strict=True):
        new.data.copy_(old)
    state = dist_checkpointing.load(state_of(resumed, copy, is_loading=True), checkpoint)
    resumed.load_state_dict(state["optimizer"])
    for one, chunk in ((optimizer, model), (resumed, copy)):
        take_step(one, chunk, [param for name, param in chunk.named_parameters() if ".experts." in name])
    for old, new in zip(model.parameters(), copy.parameters(), strict=True):
        assert old.equal(new)
