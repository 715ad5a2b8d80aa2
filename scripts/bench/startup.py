"""Time `import megatron_mtp_patches` in a fresh interpreter, and apply() in one that has imported Megatron.

    python -m scripts.bench import --python 0.18.2=PYTHON --python 0.19.2=PYTHON [--out ci/bench]

The medians are of CPU time. A row that misses its target says so. Needs torch and megatron-core in each Python; a
TransformerEngine is not imported.
"""

from __future__ import annotations

import argparse
from statistics import median

from scripts.common.process import environment, run_or_exit

from . import results

IMPORT_LIMIT = 60.0  # ms
APPLY_LIMIT = 1.2  # CPU-seconds
IMPORTS = 5
APPLIES = 3
IMPORT = (
    "import sys, time; start = time.process_time(); import megatron_mtp_patches; "
    "print(1e3 * (time.process_time() - start), 'torch' in sys.modules)"
)

# In a process in which all of Megatron that the patches touch is imported, as in a training script.
APPLY = """
import contextlib, importlib, sys, time, warnings
sys.modules["transformer_engine"] = None  # without its kernels it cannot be imported
import torch, megatron_mtp_patches
from megatron_mtp_patches.megatron_engine import ENGINE
warnings.simplefilter("ignore")
megatron_mtp_patches.revert()
for module in ENGINE.modules:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
start = time.process_time()
megatron_mtp_patches.apply("all")
print(time.process_time() - start)
"""

add_arguments = results.add_arguments


def run(options: argparse.Namespace) -> None:
    from rich.progress import track

    rows = [measure(release, python) for release, python in track(options.python.items(), "importing")]
    results.report("import", rows, options)


def measure(release: str, python: str) -> results.Row:
    imports = _run_in_fresh(python, IMPORT, "all", IMPORTS)
    applies = _run_in_fresh(python, APPLY, "none", APPLIES)
    loads_torch = any(loaded == "True" for _, loaded in imports)
    return row(release, [float(ms) for ms, _ in imports], loads_torch, [float(seconds) for (seconds,) in applies])


def row(release: str, import_ms: list[float], loads_torch: bool, apply_seconds: list[float]) -> results.Row:
    taken, applying = median(import_ms), median(apply_seconds)
    misses = [f"{taken:.1f} ms, not under {IMPORT_LIMIT:g}"] if taken >= IMPORT_LIMIT else []
    misses += ["it imports torch"] if loads_torch else []
    misses += [f"apply() takes {applying:.2f} s, not under {APPLY_LIMIT:g}"] if applying >= APPLY_LIMIT else []
    return {"release": release, "ms": taken, "loads torch": loads_torch, "apply s": applying, "misses": misses}


def _run_in_fresh(python: str, code: str, patches: str, times: int) -> list[list[str]]:
    """The words that `code` prints last in each process. One more process, which comes first, writes the bytecode."""
    variables = environment(patches, PYTHONDONTWRITEBYTECODE="")
    command = [python, "-W", "ignore", "-c", code]
    return [run_or_exit(command, variables).splitlines()[-1].split() for _ in range(1 + times)][1:]
