"""The tag of the heads is on every parameter that an optimizer may see in place of theirs."""

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, optimizer

from megatron_overrides.norms.groups import tagged_group
from megatron_overrides.norms.optimizer_tree import leaves

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-mtp-grads-separately")]


@pytest.mark.parametrize("flags", [{"mtp_detach_heads": True}, {"separate_mtp_grad_clip": True}])
def test_the_heads_are_tagged_and_nothing_else(make_model, flags):
    model = make_model(**flags)
    for name, param in model.named_parameters():
        assert getattr(param, "grad_norm_group", None) == ("mtp" if name.startswith("mtp.") else None)
        assert getattr(param, "is_mtp_param", False) is name.startswith("mtp.")


def test_without_a_flag_nothing_is_tagged(make_model):
    assert not any(hasattr(param, "grad_norm_group") for param in make_model().parameters())


def count_tagged_elements(optimizer):
    """Return the number of tagged elements in the optimizer."""
    return sum(p.numel() for leaf in leaves(optimizer) for p in leaf.get_parameters() if tagged_group(p) == "mtp")


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_main_params_and_shards_are_tagged(make_model, distributed, bf16):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = make_model(separate_mtp_grad_clip=True, bf16=bf16)
    model = model.bfloat16() if bf16 else model
    heads = sum(param.numel() for param in model.mtp.parameters())
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=bf16, use_distributed_optimizer=distributed)
    assert count_tagged_elements(get_megatron_optimizer(config, [wrapped])) == heads


def test_parameters_created_again_after_the_model_was_built_are_tagged(make_model):
    """to_empty() after a start on the meta device creates new ones, and so does Megatron-FSDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = make_model(mtp_detach_heads=True)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = torch.nn.Parameter(param.detach().clone())
    assert not any(hasattr(param, "grad_norm_group") for param in model.parameters())
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1), [wrapped])
    assert count_tagged_elements(optimizer) == sum(param.numel() for param in model.mtp.parameters())


def test_a_shard_gets_the_tag_and_the_other_attributes():
    whole, shard, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    whole.grad_norm_group, whole.tensor_model_parallel, whole.allreduce = "mtp", True, False
    tensor_parallel.copy_tensor_model_parallel_attributes(shard, whole)
    assert (shard.grad_norm_group, shard.is_mtp_param, shard.tensor_model_parallel) == ("mtp", True, True)
    optimizer.copy_optimizer_param_metadata(other, whole)
    assert (other.grad_norm_group, other.allreduce) == ("mtp", False)
    assert optimizer.MTP_GRAD_NORM_GROUP == "mtp" and "mtp" in optimizer.SEPARATE_GRAD_NORM_GROUPS
