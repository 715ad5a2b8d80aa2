"""Loading asks for Megatron's arguments by the name that Megatron's own function looks up."""

import argparse

import pytest
from megatron_mtp_patches.engine.call import Call

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("initialize-mtp-heads")]

checkpointing = pytest.importorskip(
    "megatron.training.checkpointing", reason="the 0.16.1 wheel has no megatron.training"
)


def test_arguments_that_a_test_or_framework_puts_there_are_seen(monkeypatch):
    from megatron_overrides.mtp.new_heads.loading import load_main_model

    def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg="load"):
        return "loaded"

    monkeypatch.setattr(checkpointing, "get_args", lambda: argparse.Namespace(mtp_init=None))
    assert load_main_model(Call(load_checkpoint, None, ([], None, None), {})) == "loaded"
