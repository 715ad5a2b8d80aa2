"""The overrides on real Megatron classes, one CPU rank."""

import megatron_mtp_patches.rehearsal.pytest_plugin  # noqa: F401  (torch.cuda must resolve to the CPU before torch users)
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def skipped_updates():
    """What a process knows of skipped updates, as before its first step."""
    from megatron_overrides.core.optimizer import skipped_updates

    skipped_updates.begin_step()
    for tally in (skipped_updates.updates, skipped_updates.updates_of_heads):
        tally.total = 0
    return skipped_updates
