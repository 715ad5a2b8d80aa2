"""What verl imports after the patches in a Ray worker: a rehearsal of Megatron, which is not there yet."""

import sys
from pathlib import Path

if "megatron_mtp_patches" not in sys.modules or "megatron.core" in sys.modules:
    raise ImportError("the patches are not what this process has imported before Megatron")

from megatron_mtp_patches import rehearsal

rehearsal.install(megatron_flags=False)
sys.path.insert(0, str(Path(__file__).parents[2] / "stand_ins" / "nvrx"))
