"""Layer 7: a process that a rehearsal starts with multiprocessing ("spawn", "forkserver") is a rehearsal, too.

A checkpoint's writer or a DataLoader's worker imports Megatron, and with it TransformerEngine: without the layers it
would look for a GPU and for kernels. multiprocessing sends each new process its preparation data first; unpickling that
data installs the layers. It applies no patches: the process applies them when it imports this package, as on a GPU. A
fork is a rehearsal already.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import sys
from typing import Any

KEY = "megatron_mtp_patches_rehearsal"
# The package is removed from sys.modules again, so that importing it applies the patches. The layers do not need it.
_CODE = """
import os, sys
sys.path[:] = {path!r}
imported = "megatron_mtp_patches" in sys.modules
asked = os.environ.get("MEGATRON_MTP_PATCHES")
os.environ["MEGATRON_MTP_PATCHES"] = "none"
from megatron_mtp_patches import rehearsal
rehearsal.install(megatron_flags=False)
del os.environ["MEGATRON_MTP_PATCHES"]
if asked is not None:
    os.environ["MEGATRON_MTP_PATCHES"] = asked
if not imported:
    sys.modules.pop("megatron_mtp_patches").revert()
"""


class _Install:
    """Pickles as a call of exec(), because the new process has not imported this package yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_CODE.format(path=sys.path), {})


def install() -> None:
    """Add the layers to the preparation data that multiprocessing sends to a new process."""
    get_preparation_data = multiprocessing.spawn.get_preparation_data

    @functools.wraps(get_preparation_data)
    def with_rehearsal(name: str) -> dict[str, Any]:
        return {KEY: _Install(), **get_preparation_data(name)}

    multiprocessing.spawn.get_preparation_data = with_rehearsal
