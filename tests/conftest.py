"""Fixtures that tests of the applied patches share."""

from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import pytest

pytest_plugins = ["tests.warm.plugin", "tests.tables"]


@pytest.fixture(scope="session")
def release():
    """The installed release of Megatron."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        pytest.skip("megatron-core is not installed")


@pytest.fixture
def unpatched():
    """with unpatched(): Megatron is as it was before the patches."""
    import megatron_mtp_patches

    @contextmanager
    def revert():
        megatron_mtp_patches.revert()
        try:
            yield
        finally:
            megatron_mtp_patches.apply()

    return revert


@pytest.fixture
def make_gpt():
    """make_gpt(vocabulary, length, **config): this rank's stage of a seeded fp32 GPT with two MTP heads, no dropout.

    `tied` ties the embeddings; mtp_num_layers=None makes a model without heads. `scatters` is False for the language
    model of a multimodal one, whose embedding leaves the scatter for sequence parallelism to its caller. `vp_stage` is
    the chunk of an interleaved pipeline. `transformer_engine` makes layers of that.
    """
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from scripts.tiny_gpt import build_gpt, make_config

    def make(vocabulary, length, tied=False, scatters=True, vp_stage=None, transformer_engine=False, **settings):
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11)
        defaults = {"hidden_size": 16, "num_attention_heads": 2, "mtp_num_layers": 2, "use_cpu_initialization": True}
        return build_gpt(
            make_config(**{**defaults, **settings}),
            vocabulary,
            length,
            transformer_engine,
            tied,
            scatter_embedding_sequence_parallel=scatters,
            vp_stage=vp_stage,
        )

    return make
