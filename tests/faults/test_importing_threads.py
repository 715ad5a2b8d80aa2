"""Who imports Megatron first: threads at the same time get it patched once and do not deadlock; so does mtp_loss."""

from __future__ import annotations

import importlib
import sys
import threading

import megatron_mtp_patches
import pytest
import torch
from megatron_mtp_patches import functional
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.source import find_file

from tests.conformance.expected import STATE
from tests.conformance.inspection import MODULES, import_targets, problems, reports
from tests.warm.processes import LIMIT, run_ranks

pytestmark = pytest.mark.forked("torch")  # torch now and then aborts a process in which several threads import it

THREADS = 8


def test_mtp_loss_may_be_the_first_that_needs_megatron_s_module():
    """Its own overrides were imported by the patches while it imported them, which refused a patch."""

    def be_first():
        assert "megatron.core" not in sys.modules
        megatron_mtp_patches.apply()
        with pytest.raises(ValueError, match="head_hiddens is empty"):
            labels, mask = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4)
            functional.mtp_loss(torch.zeros(4, 1, 2), [], labels, mask, None)
        assert not [one.id for one in megatron_mtp_patches.status() if one.state == "refused"]

    (ended,) = run_ranks(1, be_first)
    assert ended.code == 0, ended.output


def test_threads_that_import_megatron_at_once_patch_it_once():
    """Each of eight threads imports others of its modules. None hangs.

    Megatron imports itself in circles, which Python may cut short where threads meet; that is not our fault.
    """
    megatron_mtp_patches.apply()
    modules = [module for module in MODULES if find_file(module)]
    together = threading.Barrier(THREADS)
    errors = []

    def run(number):
        together.wait()
        for module in modules[number::THREADS]:
            try:
                importlib.import_module(module)
            except Exception as error:
                errors.append(f"{module}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=[number], daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT / 2)
    assert not any(thread.is_alive() for thread in threads)
    assert [error for error in errors if "PatchError" in error or "megatron_mtp" in error] == []
    import_targets()
    states = reports()
    for patch in CATALOG:
        assert problems(patch, states[patch.id], STATE[patch.id]) == []
