"""The frameworks whose source is known are those that the tests run."""

from __future__ import annotations

from pathlib import Path

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.fingerprints import KnownSources
from megatron_mtp_patches.megatrons.known import MEGATRONS

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = KnownSources.read(Path(megatron_mtp_patches.__file__).with_name("fingerprints.json"))
# emerging-optimizers is none: its patch depends on nothing but names.
FRAMEWORKS = [patch for patch in CATALOG if patch.package and any(edit.check_source for edit in patch.edits)]


@pytest.fixture(scope="module")
def tested():
    """The requirements that the matrix pins, in lower case, and the TransformerEngine of each release."""
    matrix = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text(encoding="utf-8"))
    pinned = {word.lower() for one in matrix["environment"] for word in (*one["installs"], *one.get("alone", ()))}
    return pinned | {f"transformer-engine=={one['transformer_engine']}" for one in MEGATRONS}


@pytest.mark.parametrize("patch", FRAMEWORKS, ids=lambda patch: patch.package)
def test_known_is_what_is_tested(patch, tested):
    name = patch.package.lower()
    known = {release.lower().replace(" ", "==") for release in SOURCES.package_releases(patch.package)}
    assert known and known == {word for word in tested if word.startswith(f"{name}==")}
