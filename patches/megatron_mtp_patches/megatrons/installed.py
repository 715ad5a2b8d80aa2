"""The Megatron that an import would find: where it lies, which release it is like, what that release was made for."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from importlib import metadata
from pathlib import Path

from ..engine.fingerprints import KnownSources, fingerprint
from ..engine.source import find_file
from ..megatron_engine import ENGINE
from .known import TRANSFORMER_ENGINE

# Modules that Megatron imports and pip knows by other names.
PACKAGES = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}


MEGATRON = ("megatron.core.", "megatron.training.", "emerging_optimizers.")  # no framework, which may change Megatron


def import_targets(packages: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Import every module that the patches touch, so that they are applied; {module: why it did not import}.

    `packages` has the beginnings of their names.
    """
    failures = {}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in filter(find_file, [name for name in ENGINE.modules if name.startswith(packages)]):
                try:
                    importlib.import_module(module)
                except Exception as error:  # whatever a broken Megatron raises belongs in the report
                    failures[module] = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return failures


def describe_megatron() -> str:
    """Return the name of this Megatron and its folder."""
    file = find_file("megatron.core")
    if file is None:
        return "megatron-core is not installed (pip install megatron-core, or put a Megatron-LM checkout on PYTHONPATH)"
    if mixture := describe_mixture():
        return mixture
    nearest = _nearest_release()
    if _is_known():
        return f"megatron-core {nearest} (by its sources), in {file.parent}"
    return f"megatron-core nearest to {nearest} (some of its sources are not in any known release), in {file.parent}"


def describe_mixture() -> str:
    """Say how the releases of megatron.core and megatron.training, in two folders, differ; '' if they do not.

    The trainer's release is that of the megatron.core beside it, which another one hides.
    """
    core, training = find_file("megatron.core"), find_file("megatron.training")
    if core is None or training is None or (folder := training.parents[2]) == core.parents[2]:
        return ""
    if find_file("megatron.core", [str(folder)]) is None:
        return ""
    core_release, trainer_release = _nearest_release(), known_sources().nearest_release(ENGINE.catalog, [str(folder)])
    if core_release == trainer_release:
        return ""
    return (
        f"megatron.core is that of {core_release}, in {core.parent}, and megatron.training that of {trainer_release}, "
        f"in {training.parent} (by their sources): take both from one release. Leave one of the two on the path "
        f"(PYTHONPATH, site-packages), or put a whole checkout of one release first on it"
    )


def find_releases() -> frozenset[str]:
    """The known releases that it is like; none where there is no Megatron."""
    return frozenset(_nearest_release().split(" or ")) if find_file("megatron.core") else frozenset()


def find_transformer_engine(releases: frozenset[str]) -> tuple[str | None, bool]:
    """TransformerEngine's version, and whether it is installed; if it is not, the one that the release was made for."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("transformer-engine"), True
    return next((TRANSFORMER_ENGINE[name] for name in sorted(releases & TRANSFORMER_ENGINE.keys())), None), False


def known_sources() -> KnownSources:
    """The known releases. They are read without the installer, which needs wrapt: `doctor` reports if it is there."""
    return KnownSources.read(Path(ENGINE.table_file))


def _is_known() -> bool:
    """True if each function that the patches compare is, in this Megatron, that of some known release."""
    sources = known_sources()
    edits = (edit for patch in ENGINE.catalog if not patch.package for edit in patch.edits if edit.check_source)
    return all(sources.releases_with(edit.target, fingerprint(edit)) for edit in edits)


def _nearest_release() -> str:
    return known_sources().nearest_release(ENGINE.catalog)
