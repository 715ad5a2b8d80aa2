"""Run in a process that a rehearsal spawns. This file imports no patches."""

import sys
from typing import Any


def report(pipe: Any) -> None:
    """Send what the process has, before and after it has imported torch."""
    before = sorted({"torch", "megatron_mtp_patches"} & sys.modules.keys())
    import torch
    import torch.nn.functional

    spec = torch.__spec__.submodule_search_locations
    pipe.send((before, str(torch.empty(1, device="cuda").device), bool(spec), "megatron_mtp_patches" in sys.modules))
