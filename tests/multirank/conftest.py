"""Tests that run on forked ranks, over gloo on CPUs: on 2, and on 4 where that makes a difference.

A collective that not all ranks enter fails the test after a minute instead of hanging it.
"""

import contextlib
import shutil
import tempfile
from datetime import timedelta
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session", autouse=True)
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def parallel():
    """parallel(**sizes) sets up Megatron's process groups, those of the last test if they have these sizes.

    Each of the thirty groups has threads of its own, which live until the group is destroyed.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = []
    last = []

    def initialize(**sizes):
        if last != [sizes]:
            destroy()
            last[:] = [sizes]
            with pytest.MonkeyPatch.context() as patch:
                original = dist.new_group
                patch.setattr(dist, "new_group", lambda *args, **kwargs: keep(original(*args, **kwargs)))
                parallel_state.initialize_model_parallel(**sizes)
        return parallel_state

    def destroy():
        parallel_state.destroy_model_parallel()
        while groups:
            with contextlib.suppress(ValueError):  # Megatron has destroyed it
                dist.destroy_process_group(groups.pop())

    def keep(group):
        if group not in (dist.GroupMember.NON_GROUP_MEMBER, None):
            groups.append(group)
        return group

    yield initialize
    destroy()


@pytest.fixture
def rank():
    import torch.distributed as dist

    return dist.get_rank()


@pytest.fixture
def world_size():
    import torch.distributed as dist

    return dist.get_world_size()


@pytest.fixture
def from_all_ranks():
    """from_all_ranks(value): the values of all ranks, in their order."""

    import torch.distributed as dist

    def gather(value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    return gather


@pytest.fixture
def checkpoint(from_all_ranks, rank):
    """An empty folder for all ranks."""
    import torch.distributed as dist

    folder = from_all_ranks(tempfile.mkdtemp() if rank == 0 else None)[0]
    yield folder
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


@pytest.fixture
def count_collectives(monkeypatch):
    """The names of the collectives that ran since the test asked for this fixture."""
    import torch.distributed as dist

    called = []

    def count(name, original):
        def counted(*args, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier"):
        count(name, getattr(dist, name))
    return called


@pytest.fixture
def fill_gradients():
    """fill_gradients(model, value): every gradient element of a DDP model, as after backward and its reduction."""

    def fill(model, value):
        for buffer in model.buffers + model.expert_parallel_buffers:
            buffer.grad_data.fill_(value)

    return fill


@pytest.fixture
def make_ddp_model():
    """make_ddp_model(): a small bf16 model in Megatron's DDP with a distributed optimizer's buffers."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    def make(**ddp):
        torch.manual_seed(0)
        return DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **ddp}),
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16(),
        )

    return make


@pytest.fixture
def make_leaf(world_norm):
    """make_leaf({tag: gradient norm}): an FP32 optimizer with a parameter for each tag."""
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    def make(norms, group=world_norm, **settings):
        params = []
        for tag, norm in norms.items():
            param = torch.nn.Parameter(torch.ones(4))
            param.main_grad = torch.full((4,), norm / 2)
            param.tensor_model_parallel = True
            if tag:
                param.grad_norm_group = tag
            params.append(param)
        config = OptimizerConfig(optimizer="adam", lr=0.1, **settings)
        optimizer = FP32Optimizer(torch.optim.AdamW([{"params": params}], lr=0.1), config, lambda *args: None)
        optimizer.grad_stats_parallel_group = group
        return optimizer

    return make


@pytest.fixture
def world_norm(parallel, world_size):
    """A Megatron whose model-parallel group is the world: norms are reduced over all ranks."""
    from megatron.core import parallel_state

    parallel(tensor_model_parallel_size=world_size)
    return parallel_state.get_model_parallel_group()


@pytest.fixture
def make_layer_wise(parallel, make_ddp_model, fill_gradients):
    """make_layer_wise(*torch optimizers, **config): LayerWise, which deals their parameters out to all ranks.

    `beside`: the gradients of another model, whose DistributedOptimizer is in a chain with it.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel()

    def make(*optimizers, beside=None, **settings):
        is_chained = beside is not None
        if is_chained and "step_with_ready_grads" not in vars(LayerWiseDistributedOptimizer):
            pytest.skip("before 0.18 LayerWise gathers in its own step, so it is never nested")
        config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=is_chained, **settings)
        groups = ProcessGroupCollection()
        groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        groups.expt_dp = parallel_state.get_expert_data_parallel_group()
        layer_wise = LayerWiseDistributedOptimizer(list(optimizers), config, groups)
        if not is_chained:
            return layer_wise
        model = make_ddp_model()
        fill_gradients(model, beside)
        return ChainedOptimizer([layer_wise, *get_megatron_optimizer(config, [model]).chained_optimizers])

    return make


@pytest.fixture
def make_mimo(parallel, rank, world_size):
    """make_mimo(params, **config): (a Mimo optimizer with a module on each rank, the optimizer of this rank's)."""
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    mimo = pytest.importorskip("megatron.core.models.mimo.optimizer", reason="0.16.1 has no MimoOptimizer")
    parallel()

    def make(params, **settings):
        config = OptimizerConfig(optimizer="adam", lr=0.1, **settings)
        mine = FP32Optimizer(torch.optim.AdamW(params, lr=0.1), config, lambda *args: None)
        infos = {
            f"module{index}": mimo.ModuleOptimizerInfo(mine if index == rank else None, None, None, index == rank)
            for index in range(world_size)
        }
        return mimo.MimoOptimizer(infos, config), mine

    return make


@pytest.fixture
def make_fsdp(parallel):
    """make_fsdp(strategy, dtype, **config): a model (or `net`) in Megatron-FSDP, and its optimizer.

    `gather`: whether parameters are gathered while layers run; None for what `overlap` says of gradients.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from tests.trainings.fsdp import CLIP, LR, WEIGHT_DECAY, Block, make_net

    parallel()
    model_parallel_cuda_manual_seed(1)

    def make(
        strategy="optim_grads_params",
        dtype=torch.bfloat16,
        mark=lambda net: None,
        overlap=True,
        gather=None,
        net=None,
        **settings,
    ):
        bf16 = dtype == torch.bfloat16
        model = FullyShardedDataParallel(
            net.config if net else TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                use_megatron_fsdp=True,
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap if gather is None else gather,
                grad_reduce_in_fp32=True,
            ),
            net or make_net(dtype),
            fsdp_unit_modules=None if net else [Block],
        )
        mark(model.module.module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            bf16=bf16,
            use_distributed_optimizer=True,
            **{"use_precision_aware_optimizer": True, "clip_grad": CLIP, "log_num_zeros_in_grad": True, **settings},
        )
        return SimpleNamespace(model=model, optimizer=get_megatron_optimizer(config, [model]), dtype=dtype)

    return make


@pytest.fixture
def norms_for_sequence_parallel(monkeypatch):
    """torch's norms refuse sequence parallelism: nobody reduces their gradient over the ranks. Not needed here."""
    import copy

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def make(cls, config, *args, **kwargs):
        config = copy.copy(config)
        config.sequence_parallel = False
        return original(cls, config, *args, **kwargs)

    monkeypatch.setattr(WrappedTorchNorm, "__new__", make)
