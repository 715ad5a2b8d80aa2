"""apply, rehearse, revert, apply leaves the installed Megatron as it was.

The patch of `verify-mtp` is added too, as that command does.
"""

import argparse
from types import FunctionType, SimpleNamespace

import megatron_mtp_patches
import pytest
from megatron.core.pipeline_parallel import schedules
from megatron_mtp_patches.megatron_engine import ENGINE
from megatron_mtp_patches.mtp.verification import LISTENING
from megatron_mtp_patches.rehearsal import megatron_flags
from megatron_mtp_patches.rehearsal.megatron_flags import RehearsalRefusal

pytestmark = pytest.mark.forked("megatron")
arguments = pytest.importorskip("megatron.training.arguments")


@pytest.fixture(scope="module", autouse=True)
def record_of_the_patches_alone():
    megatron_mtp_patches.apply()
    record = megatron_mtp_patches.record()
    ENGINE.add_base(LISTENING)
    megatron_flags.install()
    return record


def default_of(dest):
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).get_default(dest)


def verifies():
    outermost = getattr(schedules.forward_step_calc_loss, "_self_override", None)
    return getattr(outermost, "__name__", None) == "silence_main_loss"


def test_in_a_rehearsal_status_reports_no_patch_as_changed():
    states = {state for report in megatron_mtp_patches.status() for state in report.targets.values()}
    assert "applied" in states and not [state for state in states if "changed" in state]


def test_apply_sets_the_flags_of_a_cpu_and_revert_restores_megatrons():
    originals = []
    for _ in range(2):
        assert default_of("distributed_backend") == "gloo"
        with pytest.raises(RehearsalRefusal):
            arguments.validate_args(SimpleNamespace(fp8="hybrid"))
        megatron_mtp_patches.revert()
        assert default_of("distributed_backend") == "nccl"
        with pytest.raises(Exception) as raised:
            arguments.validate_args(SimpleNamespace(fp8="hybrid"))
        assert not isinstance(raised.value, RehearsalRefusal)
        originals.append((arguments.add_megatron_arguments, arguments.validate_args))
        megatron_mtp_patches.apply()
    assert originals[0] == originals[1]
    assert {type(original) for original in originals[0]} == {FunctionType}


def test_apply_installs_the_verification_and_revert_removes_it():
    assert verifies()
    megatron_mtp_patches.revert()
    assert not verifies()
    megatron_mtp_patches.apply()
    assert verifies()


def test_status_and_the_record_that_ranks_compare_are_the_same_after_revert_and_apply(record_of_the_patches_alone):
    status = megatron_mtp_patches.status()
    assert megatron_mtp_patches.record() == record_of_the_patches_alone
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply()
    assert megatron_mtp_patches.status() == status
    assert megatron_mtp_patches.record() == record_of_the_patches_alone
