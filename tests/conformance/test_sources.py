"""The state of each patch is read from Megatron's source alone, in this release and where a source has changed."""

from __future__ import annotations

import contextlib
import importlib
import sys

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.megatron_engine import ENGINE

from .changed_sources import (
    change_comments,
    change_line,
    checked_targets,
    declare_in_class,
    make_checkout,
)
from .expected import EXPECTED

pytestmark = pytest.mark.forked("python")  # find_file() says of an imported module where it was imported from

PATCHES_OF = checked_targets()
# Their probes ask for a name of which no known release has any.
NATIVE_NOWHERE = [patch for patch in CATALOG if patch.probe and not patch.is_native_anywhere]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A Megatron that shadows the installed one, with copies of the files that matter."""
    folder = tmp_path_factory.mktemp("checkout")
    make_checkout(folder, {target.partition(":")[0]: str for target in PATCHES_OF})
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def changed(checkout):
    """with changed(target, change): the source of the target's module is changed."""

    @contextlib.contextmanager
    def change_file(target, change):
        file = find_file(target.partition(":")[0])
        assert file.is_relative_to(checkout) and not file.is_symlink()
        source = file.read_text(encoding="utf-8")
        file.write_text(change(source), encoding="utf-8")
        try:
            yield file
        finally:
            file.write_text(source, encoding="utf-8")

    return change_file


def report_on(patches):
    """What is reported of these patches; Megatron is not imported."""
    megatron_mtp_patches.apply(",".join(patch.id for patch in patches), "skip")
    return [ENGINE.report(patch) for patch in patches]


@pytest.mark.parametrize("target", PATCHES_OF)
def test_a_changed_line_is_refused(target, changed):
    with changed(target, change_line(target.partition(":")[2])) as file:
        actual = report_on(PATCHES_OF[target])
    for report in actual:
        if EXPECTED[report.id] == "native":
            assert report.state == "native"
        else:
            assert report.state == "refused"
            assert target in report.reason and str(file) in report.reason


def test_comments_docstrings_and_layout_do_not_count(changed):
    names = {}
    for target in PATCHES_OF:
        module, _, name = target.partition(":")
        names.setdefault(module, []).append(name)
    with contextlib.ExitStack() as stack:
        for module in names:
            stack.enter_context(changed(module, change_comments(names[module])))
        reported = report_on(dict.fromkeys(patch for patches in PATCHES_OF.values() for patch in patches))
    assert len(reported) > 50
    for report in reported:
        assert report.state == ("native" if EXPECTED[report.id] == "native" else "pending")
        assert ("repaired" in report.reason) == (EXPECTED[report.id] == "repaired")


@pytest.mark.parametrize("patch", NATIVE_NOWHERE, ids=lambda patch: patch.id)
def test_a_setting_that_no_known_release_has_is_refused(patch, changed):
    """It may be the same change and may do anything, so the patch is not called native, nor applied over it."""
    owner, _, name = patch.probe.target.partition(":")[2].rpartition(".")
    with changed(patch.probe.target.rpartition(".")[0], declare_in_class(owner, name)) as file:
        (report,) = report_on([patch])
    assert report.state == "refused"
    assert patch.probe.target in report.reason and str(file) in report.reason


def test_neither_torch_nor_megatron_is_imported_for_it():
    report_on(CATALOG)
    assert {name.partition(".")[0] for name in sys.modules} & {"torch", "megatron"} == set()
