"""Workers that are forked and spawned, and configurations with added fields that travel to them."""

from __future__ import annotations

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

from tests.warm.processes import LIMIT

from .dataset import Report

pytestmark = pytest.mark.forked("patched")

PATCHED = {
    "imported": True,
    "step": "megatron_overrides",
    "values": [True, 0.5],
    "fields": [True, True],
    "refused": "",
}


@pytest.fixture(scope="module")
def configs():
    return (
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, separate_mtp_grad_clip=True),
        OptimizerConfig(optimizer="adam", lr=0.1, min_clip_coefficient=0.5),
    )


def ask_worker(configs, way):
    """What a worker that is started in this way reports before and after it imports the patches."""
    return list(
        DataLoader(Report(*configs), batch_size=None, num_workers=1, multiprocessing_context=way, timeout=LIMIT)
    )


@pytest.fixture(scope="module")
def spawned(configs):
    return ask_worker(configs, "spawn")


def test_a_forked_worker_is_patched(configs):
    assert ask_worker(configs, "fork") == [PATCHED, PATCHED]


@pytest.mark.real_process("a spawned worker imports all that it needs")
def test_a_spawned_worker_that_does_not_import_the_patches_is_not_patched_and_reads_the_configuration(spawned):
    """The values come along as plain attributes; the class there knows no such fields, and says so if it is asked."""
    facts, _ = spawned
    assert (facts["imported"], facts["step"], facts["fields"]) == (False, "megatron", [False, False])
    assert facts["values"] == [True, 0.5]
    assert "unexpected keyword argument 'min_clip_coefficient'" in facts["refused"]


@pytest.mark.real_process("a spawned worker imports all that it needs")
def test_a_spawned_worker_that_imports_the_patches_is_patched(spawned):
    _, facts = spawned
    assert facts == PATCHED
