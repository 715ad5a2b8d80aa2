"""Under Megatron-FSDP the norm and the zeros count each gradient of one copy of the model once, in each layout."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-fsdp-replicas-once")]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
pytest.importorskip("transformer_engine", reason="its layers")


@pytest.fixture
def check_layout(parallel):
    """check_layout(strategy, tp, ep, etp): the norm where each gradient is 1, the number of zeros where each is 0."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron_mtp_patches.defects.labs.fsdp_lab import train_gpt

    def check(strategy, tensor=1, expert=1, expert_tensor=None, instances=1):
        sizes = {"tensor_model_parallel_size": tensor}
        if expert_tensor:
            sizes |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": expert_tensor}
        parallel(**sizes, num_distributed_optimizer_instances=instances)
        model_parallel_cuda_manual_seed(1)
        optimizer, gradients = train_gpt(strategy, instances, **sizes)
        params = optimizer.get_parameters()
        for param in params:
            param.grad._local_tensor.fill_(1.0)
        assert optimizer.get_grad_norm() == pytest.approx(gradients**0.5, rel=1e-5)
        for param in params:
            param.grad._local_tensor.fill_(0.0)
        assert optimizer.count_zeros() == gradients

    return check


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "strategy, sizes",
    [("no_shard", ()), ("no_shard", (1, 2, 1)), ("optim_grads_params", (2,))],
    ids=["no_shard", "no_shard EP2", "optim_grads_params TP2"],
)
def test_two_ranks_count_one_copy(check_layout, strategy, sizes):
    check_layout(strategy, *sizes)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 1, 2)], ids=["TP2 ETP1", "TP2 ETP2"])
def test_four_ranks_count_one_copy(check_layout, sizes):
    check_layout("no_shard", *sizes)


@pytest.mark.ranks(4)
def test_each_instance_of_the_optimizer_counts_one_copy(check_layout):
    check_layout("no_shard", instances=2)
