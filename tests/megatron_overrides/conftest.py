"""The overrides on real Megatron classes, one rank, in a rehearsal; with TEST_DEVICE=gpu on a GPU.

There a tensor lies on the GPU unless a test says otherwise.
"""

import copy

import pytest

from tests.warm.levels import ON_GPU


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    import torch
    from megatron.core import parallel_state

    if ON_GPU:
        torch.set_default_device("cuda")
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    else:
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def make_optimizer():
    """make_optimizer(kind, **config): (optimizer, its model parameters), the same numbers at each call.

    With heads=True every second parameter is tagged as one of an MTP head, before the optimizer copies or shards it.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.transformer import TransformerConfig

    def mark(params):
        for param in params[1::2]:
            param.grad_norm_group = "mtp"

    def make_fp32(config, seed, heads):
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
        mark(params if heads else [])
        return FP32Optimizer(torch.optim.AdamW(params, lr=0.1), config, lambda *args: None), params

    def make_float16(config, seed, heads):
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16)) for _ in range(2)]
        mark(params if heads else [])
        adam = torch.optim.AdamW(params, lr=0.1)
        return Float16OptimizerWithFloat16Params(adam, config, None, lambda *args: None), params

    def make_distributed(config, seed, heads):
        from megatron.core.optimizer import get_megatron_optimizer

        torch.manual_seed(seed)
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.nn.Linear(3, 4).bfloat16(),
        )
        mark(list(model.parameters()) if heads else [])
        config.use_distributed_optimizer = True
        optimizer = get_megatron_optimizer(config, [model])
        while hasattr(optimizer, "chained_optimizers"):
            (optimizer,) = optimizer.chained_optimizers
        return optimizer, list(model.parameters())

    makers = {"fp32": make_fp32, "float16": make_float16, "distributed": make_distributed}

    def make(kind, heads=False, **settings):
        bf16 = kind in ("float16", "distributed")
        config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=bf16, params_dtype=torch.float32, **settings)
        if kind != "chained":
            return makers[kind](config, 0, heads)
        first, first_params = make_fp32(config, 0, heads)
        second, second_params = make_fp32(config, 1, heads)
        return ChainedOptimizer([first, second]), first_params + second_params

    return make


@pytest.fixture
def give_gradients():
    """give_gradients(params, scale): seeded gradients where this kind of parameter carries them."""
    import torch

    def give(params, scale=1.0):
        torch.manual_seed(7)
        for param in params:
            grad = torch.randn(param.shape) * scale
            if hasattr(param, "main_grad"):
                param.main_grad.copy_(grad)
            else:
                param.main_grad = grad
        return params

    return give


@pytest.fixture
def snapshot():
    """snapshot(optimizer, params): everything that an update may change, to compare bitwise."""

    def take(optimizer, params):
        state = optimizer.state_dict()
        return copy.deepcopy([[param.detach() for param in params], state])

    return take


@pytest.fixture
def assert_same():
    import torch

    def compare(left, right):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)

    return compare


@pytest.fixture
def make_chain():
    """make_chain({(exempt, tag): gradient norm}): a chain of an exempt and an ordinary optimizer, a parameter each."""
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    def make(norms, **settings):
        leaves = []
        for exempt in (True, False):
            params = []
            for (is_exempt, tag), norm in norms.items():
                if is_exempt is exempt:
                    param = torch.nn.Parameter(torch.ones(4))
                    param.main_grad = torch.full((4,), norm / 2)
                    if tag:
                        param.grad_norm_group = tag
                    params.append(param)
            config = OptimizerConfig(optimizer="sgd", lr=0.1, **settings)
            leaf = FP32Optimizer(torch.optim.SGD([{"params": params}], lr=0.1), config, lambda *args: None)
            leaf.grad_stats_parallel_group = None
            leaf.skip_grad_norm_clip = exempt
            leaves.append(leaf)
        return ChainedOptimizer(leaves)

    return make
