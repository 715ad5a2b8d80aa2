"""A GPT with MTP heads in DDP, and its optimizer, on one CPU rank."""

import pytest

from tests.megatron_overrides.conftest import one_rank  # noqa: F401 - each test has it

VOCABULARY, LENGTH, BATCH = 32, 12, 2


@pytest.fixture
def make_training(make_gpt):
    """make_training(dtype=..., distributed=..., groups=..., **model settings): (model in DDP, its optimizer), seeded.

    `groups`: --grad-norm-group.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def make(dtype=torch.float32, distributed=False, groups=None, **settings):
        gpt = make_gpt(VOCABULARY, LENGTH, **settings)
        if dtype is torch.bfloat16:
            gpt.bfloat16()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        model = DistributedDataParallel(gpt.config, ddp, gpt)
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            clip_grad=1.0,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            **({"grad_norm_group": groups} if groups else {}),
        )
        return model, get_megatron_optimizer(config, [model])

    return make


@pytest.fixture
def batch():
    """Tokens, positions, attention mask and loss mask of one microbatch."""
    import torch

    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    return (
        torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator),
        torch.arange(LENGTH).expand(BATCH, -1).contiguous(),
        torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not(),
        (torch.rand(BATCH, LENGTH, generator=generator) > 0.2).float(),
    )
