"""What a warm process has imported. Each level is a fork of another one.

    python    pytest and nothing of ours
    torch     from python: torch, the layers of the rehearsal, and TransformerEngine where it is one of them; nothing of
              Megatron. Patches are not applied
    megatron  from torch: every module of Megatron that the patches touch, unpatched; nothing of a framework
    patched   from megatron: the patches are applied
    bridge    from torch: with the patches and Megatron's flags of a rehearsal, what runs of Megatron-Bridge import
    verl      from torch: with them, what runs of verl import

With TEST_DEVICE=gpu there is no rehearsal: torch.cuda is the GPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

MOST_RANKS = 4  # of a test; a rehearsal makes as many imaginary devices
STAND_INS = Path(__file__).parents[1] / "stand_ins"
_reached: list[str] = []  # by this process
ON_GPU = os.environ.get("TEST_DEVICE") == "gpu"


def missing(level: str) -> str | None:
    """Which package this level needs and this environment lacks."""
    if level not in LEVELS:
        raise ValueError(f"there is no level {level!r}; there are {', '.join(LEVELS)}")
    for package in LEVELS[level].packages:
        try:
            if importlib.util.find_spec(package) is None:
                return package
        except ModuleNotFoundError:  # of its parent
            return package
    return None


def declared_level(file: Path) -> str | None:
    """The level that the `pytestmark` of a test file names; the file itself is not imported."""
    mark = re.search(r'^pytestmark = \[?\s*pytest\.mark\.forked\("(\w+)"\)', file.read_text("utf-8"), re.MULTILINE)
    return mark[1] if mark else None


def climb(level: str) -> None:
    """Bring this process to `level`, past those between; forks of it are there already."""
    if level in _reached:
        return
    if origin := LEVELS[level].origin:
        climb(origin)
    LEVELS[level].reach()
    _reached.append(level)


def _python() -> None:
    warnings.simplefilter("ignore")
    for plugin in entry_points(group="pytest11"):
        plugin.load()  # which each fork's pytest would do
    with contextlib.suppress(ImportError):
        import hypothesis  # noqa: F401 - its plugin would import it in each fork


def _torch() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "MEGATRON_MTP_PATCHES": "none"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU makes no context, which forks could not use
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import megatron_mtp_patches
    from megatron_mtp_patches import rehearsal

    if not ON_GPU:
        with pytest.MonkeyPatch.context() as variables:  # it makes a device for each local rank
            variables.setenv("RANK", "0")
            variables.setenv("LOCAL_WORLD_SIZE", str(MOST_RANKS))
            rehearsal.install(megatron_flags=False)
    import torch

    torch.set_num_threads(1)
    if rehearsal.with_transformer_engine():
        importlib.import_module("transformer_engine.pytorch")
    megatron_mtp_patches.revert()
    del os.environ["MEGATRON_MTP_PATCHES"]


def _megatron() -> None:
    from megatron_mtp_patches.engine.source import find_file
    from megatron_mtp_patches.megatron_engine import ENGINE
    from megatron_mtp_patches.megatrons.installed import MEGATRON

    for module in ENGINE.modules:
        if module.startswith(MEGATRON) and find_file(module):
            importlib.import_module(module)
    ENGINE.read_sources()
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.utils.tensorboard")
    _remember_docstrings()


def _remember_docstrings() -> None:
    """Have Megatron's parser read the docstrings of its configurations here, not in each fork."""
    try:
        from megatron.training import arguments
    except ImportError:  # the wheel of 0.16.1 has no trainer
        return
    from megatron_mtp_patches.parity.processes import remember_docstrings

    remember_docstrings()
    arguments.add_megatron_arguments(argparse.ArgumentParser(conflict_handler="resolve"))


def _patched() -> None:
    import megatron_mtp_patches

    megatron_mtp_patches.apply()


def _bridge() -> None:
    _rehearse_framework()
    importlib.import_module("megatron.bridge.training.pretrain")
    importlib.import_module("transformers")


def _verl() -> None:
    _rehearse_framework()
    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # it starts no thread
    importlib.import_module("verl.workers.engine_workers")


def _rehearse_framework() -> None:
    """Apply the patches, and let Megatron-Bridge be imported, which verl imports, too."""
    import megatron_mtp_patches
    from megatron_mtp_patches import rehearsal

    rehearsal.install()
    megatron_mtp_patches.apply()
    sys.path.insert(0, str(STAND_INS / "nvrx"))


class Level(NamedTuple):
    """A level of warm processes.

    Attributes:
        origin: the level whose process is forked for it, if there is one.
        packages: what it needs.
        reach: brings a process from its origin to it.
    """

    origin: str | None
    packages: tuple[str, ...]
    reach: Callable[[], None]


_MEGATRON = ("torch", "megatron.core")
LEVELS = {
    "python": Level(None, (), _python),
    "torch": Level("python", ("torch",), _torch),
    "megatron": Level("torch", _MEGATRON, _megatron),
    "patched": Level("megatron", _MEGATRON, _patched),
    "bridge": Level("torch", (*_MEGATRON, "megatron.bridge"), _bridge),
    "verl": Level("torch", (*_MEGATRON, "verl"), _verl),
}
