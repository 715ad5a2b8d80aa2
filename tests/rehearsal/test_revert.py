"""apply, rehearse, revert, apply is the identity on the installed Megatron, which a separate process imports.

The process adds the patch of `verify-mtp` too, as that command does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from .conftest import clean_environment

ROUND = """
import argparse, dataclasses, importlib, json
from types import FunctionType, SimpleNamespace

import megatron_mtp_patches
from megatron_mtp_patches import rehearsal
from megatron_mtp_patches.cli.megatron import import_targets
from megatron_mtp_patches.cli.verify import VERIFICATION

alone = megatron_mtp_patches.record()
megatron_mtp_patches._engine.add_base(VERIFICATION)
rehearsal.install()
import_targets()
arguments = importlib.import_module("megatron.training.arguments")
schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")


def see():
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    try:
        arguments.validate_args(SimpleNamespace(fp8="hybrid"))
    except Exception as error:
        raised = type(error).__name__
    outermost = getattr(schedules.forward_step_calc_loss, "_self_wrapper", None)
    return dict(
        verifies=getattr(outermost, "__name__", None) == "silence_main_loss",
        default=parser.get_default("transformer_impl"),
        raised=raised,
        original=type(arguments.validate_args) is FunctionType,
        targets={state for report in megatron_mtp_patches.status() for state in report.targets.values()},
        status=[dataclasses.asdict(report) for report in megatron_mtp_patches.status()],
        record=megatron_mtp_patches.record(),
    )


def revert():
    megatron_mtp_patches.revert()
    return see(), (arguments.validate_args, arguments.add_megatron_arguments)


applied = [see()]
reverted, originals = revert()
megatron_mtp_patches.apply()
applied.append(see())
same = all(one is other for one, other in zip(revert()[1], originals))
print(json.dumps(dict(alone=alone, applied=applied, reverted=reverted, same=same), default=sorted))
"""


@pytest.fixture(scope="module")
def told():
    if find_spec("megatron") is None or find_spec("megatron.training") is None:
        pytest.skip("no Megatron with megatron.training is installed")
    command = [sys.executable, "-W", "ignore", "-c", ROUND]
    environment = clean_environment(MEGATRON_MTP_PATCHES="all")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_rehearsal_leaves_no_patch_changed(told):
    targets = told["applied"][0]["targets"]
    assert "applied" in targets and not [state for state in targets if "changed" in state]


def test_the_flags_are_in_force_after_each_apply_and_megatron_s_own_after_each_revert(told):
    for applied in told["applied"]:
        assert (applied["default"], applied["raised"], applied["original"]) == ("local", "RehearsalRefusal", False)
    reverted = told["reverted"]
    assert (reverted["default"], reverted["original"]) == ("transformer_engine", True)
    assert reverted["raised"] != "RehearsalRefusal"
    assert told["same"]


def test_so_is_the_verification(told):
    assert all(applied["verifies"] for applied in told["applied"]) and not told["reverted"]["verifies"]


def test_revert_and_apply_are_the_identity(told):
    first, second = told["applied"]
    assert first == second


def test_ranks_agree_whether_or_not_they_rehearse(told):
    assert told["applied"][0]["record"] == told["alone"]
