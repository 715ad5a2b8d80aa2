"""Eight threads import different modules of Megatron at once, with the hooks in place."""

from __future__ import annotations

import importlib
import threading

import torch  # noqa: F401, which itself now and then aborts the process where several threads import it
from inspect_patches import declared, describe, import_targets
from megatron_mtp_patches.engine.source import find_file

THREADS = 8
PATIENCE = 200


def look() -> dict:
    modules = [module for patch in declared() for module in patch.modules if find_file(module)]
    modules = list(dict.fromkeys(modules))
    together = threading.Barrier(THREADS)
    errors: list[str] = []

    def run(number: int) -> None:
        together.wait()
        for module in modules[number::THREADS]:
            try:
                importlib.import_module(module)
            except Exception as error:
                errors.append(f"{module}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=[number], daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    hanging = sum(thread.is_alive() for thread in threads)
    import_targets(declared())
    return {"modules": len(modules), "errors": errors, "hanging": hanging, "found": describe()}
