"""Megatron first, the patches later: edits that fail, other libraries, and sources that change on disk."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ["MEGATRON_MTP_PATCHES"] = "none"

import failing_edits
import inspect_patches
import megatron_mtp_patches
import other_libraries
import upgraded_megatron
from megatron_mtp_patches.engine import slots

if __name__ == "__main__":
    megatron_mtp_patches.revert()
    inspect_patches.import_targets(inspect_patches.declared())
    del os.environ["MEGATRON_MTP_PATCHES"]
    # Copies of Megatron's functions are looked for in all modules; thousands of them have none.
    near = {name: module for name, module in sys.modules.items() if name.startswith("megatron") or name == "torch"}
    slots.sys = SimpleNamespace(modules=near)
    families = (failing_edits, other_libraries, upgraded_megatron)
    print(json.dumps({family.__name__: family.look() for family in families}))
