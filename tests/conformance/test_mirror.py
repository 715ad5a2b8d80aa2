"""An override stands at the path of the Megatron module that it changes; what overrides share is in `support`."""

from pathlib import Path

import pytest
from megatron_mtp_patches import catalog

import megatron_overrides

pytestmark = pytest.mark.forked("python")

ROOT = Path(megatron_overrides.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.stat().st_size and path != ROOT / "__init__.py"
)
TARGETS = {edit.module for patch in (*catalog.CATALOG, *catalog.BASE) for edit in patch.edits}
PACKAGES = {target for target in TARGETS if any(other.startswith(f"{target}.") for other in TARGETS)}


@pytest.mark.parametrize("module", [module for module in MODULES if module.partition(".")[0] != "support"])
def test_every_override_stands_at_the_path_of_a_module_that_it_changes(module):
    """Or below it, in a folder that divides what Megatron has in one file."""
    mirrored = {module, f"megatron.{module}"}
    files = TARGETS - PACKAGES
    stands_below = any(path.startswith(f"{file}.") for path in mirrored for file in files)
    assert mirrored & TARGETS or stands_below, "move it to the path of the module that it changes, or into support/"
