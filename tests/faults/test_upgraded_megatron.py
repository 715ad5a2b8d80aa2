"""Megatron's files change on disk while a process runs: refused by name, and nothing is half applied."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import megatron_mtp_patches
import pytest
from megatron_mtp_patches import PatchError
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Override

from tests.conformance.changed_sources import change_line, change_nothing, make_checkout
from tests.conformance.expected import STATE
from tests.conformance.inspection import count, import_targets, reports

pytestmark = pytest.mark.forked("torch")  # of Megatron, which here comes from a folder that may be written to

MODULE, NAME = "megatron.core.optimizer.optimizer", "ChainedOptimizer.step"
TARGET = f"{MODULE}:{NAME}"
USERS = [patch for patch in CATALOG if any(edit.target == TARGET for edit in patch.edits)]


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The module whose file changes, imported and unpatched, as all that the patches touch."""
    folder = make_checkout(tmp_path_factory.mktemp("checkout"), {MODULE: change_nothing})
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    import_targets()
    return sys.modules[MODULE]


@pytest.fixture
def file(module):
    """Its file, which is as it was after the test. So is the module, which is loaded from it again."""
    file = Path(module.__file__)
    source = file.read_text(encoding="utf-8")
    yield file
    file.write_text(source, encoding="utf-8")
    megatron_mtp_patches.revert()
    importlib.reload(module)


def change(file, how):
    file.write_text(how(file.read_text(encoding="utf-8")), encoding="utf-8")


def test_a_changed_file_of_an_imported_module_is_refused_by_name(file):
    change(file, change_line(NAME))
    with pytest.raises(PatchError, match=f"{TARGET} is not the source of any release"):
        megatron_mtp_patches.apply("skip-update-on-large-grad-norm")


def test_code_that_was_imported_from_another_file_is_refused_by_name(file):
    change(file, lambda source: f"# a line more\n{source}")
    with pytest.raises(PatchError, match="does not run what is in .* Start the process again"):
        megatron_mtp_patches.apply("skip-update-on-large-grad-norm")


def test_a_reload_refuses_the_patches_that_need_the_changed_function_and_keeps_the_rest(file, module):
    megatron_mtp_patches.apply()
    change(file, change_line(NAME))
    with pytest.raises(PatchError, match=f"is refused: {TARGET} is not the source of any release"):
        importlib.reload(module)
    states = reports()
    assert USERS
    for patch in CATALOG:
        assert states[patch.id].state == ("refused" if patch in USERS else STATE[patch.id])


def test_everything_is_applied_once_the_file_is_as_it_was(file, module):
    source = file.read_text(encoding="utf-8")
    megatron_mtp_patches.apply()
    change(file, change_line(NAME))
    with pytest.raises(PatchError):
        importlib.reload(module)
    change(file, lambda _: source)
    megatron_mtp_patches.apply("none")
    importlib.reload(module)
    megatron_mtp_patches.apply()
    states = reports()
    for patch in CATALOG:
        assert states[patch.id].state == STATE[patch.id]
        if STATE[patch.id] in ("applied", "repaired"):
            assert {count(edit) for edit in patch.edits if isinstance(edit, Override) and edit.where == "present"} <= {
                1,
                None,
            }
