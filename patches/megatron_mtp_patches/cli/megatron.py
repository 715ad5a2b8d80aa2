"""What the commands have in common: the Megatron that an import would find."""

from __future__ import annotations

import importlib
import logging
import warnings
from pathlib import Path

from .. import _engine
from ..engine.fingerprints import open_table
from ..engine.source import find_file


def import_targets() -> dict[str, str]:
    """Import every module that the patches touch, so that they are applied; {module: why it did not import}."""
    failures = {}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in filter(find_file, _engine.modules):
                try:
                    importlib.import_module(module)
                except Exception as error:  # whatever a broken Megatron raises belongs in the report
                    failures[module] = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return failures


def describe_megatron() -> str:
    """Which Megatron it is and where it lies."""
    file = find_file("megatron.core")
    if file is None:
        return "megatron-core is not installed (pip install megatron-core, or put a Megatron-LM checkout on PYTHONPATH)"
    return f"megatron-core like {_nearest_release()}, in {file.parent}"


def find_releases() -> frozenset[str]:
    """The known releases that it is like; none where there is no Megatron."""
    return frozenset(_nearest_release().split(" or ")) if find_file("megatron.core") else frozenset()


def _nearest_release() -> str:
    # Not the installer's table: that would need wrapt, and `doctor` tells whether it is there.
    return open_table(Path(_engine.table_file), _engine.catalog).nearest_release(_engine.catalog)
