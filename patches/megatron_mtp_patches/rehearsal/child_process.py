"""Runs first in a process that a rehearsal has started: it is to be a rehearsal as soon as it needs torch.

children.py has it run by its path, because the process has not imported this package, and importing it applies patches.
Many such processes never import torch (a queue's server), for which the layers would take seconds.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("torch", "transformer_engine")
CHOICE = "MEGATRON_MTP_PATCHES"


class InstallFirst:
    """A finder that installs the layers of the rehearsal at the first import of one of NAMES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in NAMES:
            return None
        sys.meta_path.remove(self)
        install_layers()
        return imported_spec(sys.modules[name]) if name in sys.modules else None


def imported_spec(module: ModuleType) -> ModuleSpec:
    """The spec of a module that was imported while it was looked for; loading it once more does nothing."""
    spec: Any = module.__spec__
    spec.loader.create_module = lambda _: module
    spec.loader.exec_module = lambda _: [vars(spec.loader).pop(name) for name in ("create_module", "exec_module")]
    return spec


def install_layers() -> None:
    """Install the layers and apply no patches: the process applies them when it imports the package."""
    was_imported = "megatron_mtp_patches" in sys.modules
    asked = os.environ.get(CHOICE)
    os.environ[CHOICE] = "none"
    from megatron_mtp_patches import rehearsal

    rehearsal.install(megatron_flags=False)
    del os.environ[CHOICE]
    if asked is not None:
        os.environ[CHOICE] = asked
    if not was_imported:
        sys.modules.pop("megatron_mtp_patches").revert()


if __name__ == "<run_path>":
    sys.path[:] = globals()["PATH"]  # of the process that started this one; children.py gives it
    sys.meta_path.insert(0, InstallFirst())
