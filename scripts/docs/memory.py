"""The bytes that Megatron-FSDP holds without and with the patch, as a table."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from scripts.common.markdown import table
from scripts.common.process import environment, run_or_exit

PATCH = "fsdp-without-master-weights"
HELD = {  # by the names of scripts/bench/held.py
    "parameters": "model weights (bf16)",
    "gradients": "gradients (fp32)",
    "main_weights": "Megatron-FSDP's main weights (fp32)",
    "optimizer_state": "FusedAdam's state",
}


def block(python: str) -> str:
    """Bytes of rank 0 of two on a CPU, with the Megatron of `python`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "memory.json")
        run_or_exit([python, "-m", "scripts.bench", "memory", PATCH, "--cpu", "--json", str(file)], environment())
        sides = json.loads(file.read_text())[PATCH]
    without, patched = sides["without"][0], sides["with"][0]
    if without["held"] == patched["held"]:
        sys.exit(f"the Megatron of {python} holds the same with and without the patch; give one with 0.16.1 or 0.17.1")
    rows = []
    for what, name in HELD.items():
        before, after, saved = without["held"][what], patched["held"][what], patched["saves"].get(what)
        theory = "" if saved is None else f"{before:,} - {saved:,} = {before - saved:,}"
        rows.append([name, f"{before:,}", f"{after:,}", theory])
    rows.append(["the three steps", without["note"], patched["note"], ""])
    return "\n".join(table(["bytes of rank 0", "without", "with", "theory"], rows, right=(1, 2)))
