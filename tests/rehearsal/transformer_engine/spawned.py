"""Run in a process that a rehearsal spawns: report what that process has. This file imports no patches."""

import sys
from typing import Any


def report(pipe: Any) -> None:
    import transformer_engine.pytorch  # noqa: F401 - imports the extension
    import transformer_engine_torch

    rehearsal = sys.modules["megatron_mtp_patches.rehearsal"]
    patched = "megatron_mtp_patches" in sys.modules
    pipe.send((rehearsal.with_transformer_engine(), transformer_engine_torch.get_cudnn_version(), patched))
