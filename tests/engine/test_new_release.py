"""Accepting a release: what is known of its sources afterwards, and of the other releases."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_mtp_patches.engine import Override, Wrap
from megatron_mtp_patches.engine.fingerprints import KnownSources
from megatron_mtp_patches.engine.new_release import add_release, make_known_sources

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Wrap("lib:C.method", "overrides:add_mark")
G = Override("lib2:g", "overrides:new_method")


@pytest.fixture
def folder_with(library, tmp_path):
    """folder_with(word): a folder with the library, in which f returns this word."""

    def make(word):
        folder = tmp_path / word
        folder.mkdir(exist_ok=True)
        source = (library.folder / "lib.py").read_text(encoding="utf-8")
        (folder / "lib.py").write_text(source.replace("original", word), encoding="utf-8")
        return [str(folder)]

    return make


def test_a_release_may_be_in_several_folders(library, tmp_path):
    """The first says what the release has; another may lack modules, and may differ."""
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    source = (library.folder / "lib.py").read_text()
    (wheel / "lib.py").write_text(source.replace("original", "older"))
    folders = [str(library.folder), str(wheel)]
    known = make_known_sources(
        [library.patch(REPLACE_F, METHOD, G, Override("absent:f", "overrides:new_method"))],
        {"1.0": folders, "2.0": folders[:1]},
    )
    assert list(known.targets["lib:f"].values()) == [["1.0", "2.0"], ["1.0"]]
    assert list(known.targets["lib:C.method"].values()) == [["1.0", "2.0"]]
    assert list(known.targets["lib2:g"].values()) == [["1.0", "2.0"]]
    assert known.targets["absent:f"] == {"absent": ["1.0", "2.0"]}


def test_releases_are_in_order_of_age_however_they_are_added(library, folder_with, tmp_path):
    patches = [library.patch(REPLACE_F, METHOD)]
    sources = {"0.9": folder_with("old"), "0.10": folder_with("new"), "main": folder_with("new")}
    added = KnownSources((), {})
    for release in ("main", "0.10", "0.9"):
        added = add_release(added, patches, release, sources[release])
    assert added.releases == ("0.9", "0.10", "main")
    assert [list(row.values()) for row in added.targets.values()] == [
        [["0.9", "0.10", "main"]],
        [["0.9"], ["0.10", "main"]],
    ]
    assert added == make_known_sources(patches, sources)


def test_what_was_known_of_a_release_is_replaced(library, folder_with, tmp_path):
    patches = [library.patch(REPLACE_F)]
    before = make_known_sources(patches, {"1.0": folder_with("old"), "2.0": folder_with("wrong")})
    after = add_release(before, patches, "2.0", folder_with("new"))
    assert after == make_known_sources(patches, {"1.0": folder_with("old"), "2.0": folder_with("new")})
    assert add_release(after, patches, "1.0", folder_with("old")) == after


def test_a_release_of_another_package_is_about_the_targets_of_its_patches(library, folder_with):
    patches = [library.patch(REPLACE_F), replace(library.patch(G), package="a-package")]
    before = make_known_sources(patches, {"1.0": folder_with("old")})
    assert before.targets["lib2:g"] == {}, "that a release of the library has none says nothing of the package"
    after = add_release(before, patches, "a-package 2.0", [str(library.folder)])
    assert after.releases == ("1.0",)
    assert (after.package_releases(""), after.package_releases("a-package")) == (("1.0",), ("a-package 2.0",))
    assert after.targets["lib:f"] == before.targets["lib:f"]
    assert list(after.targets["lib2:g"].values()) == [["a-package 2.0"]]
    assert add_release(after, patches, "1.0", folder_with("new")).targets["lib2:g"] == after.targets["lib2:g"]


def test_of_what_is_no_release_only_the_targets_that_are_named_become_known(library, folder_with):
    patches = [library.patch(REPLACE_F, METHOD, G)]
    old = folder_with("old")
    Path(*old, "lib2.py").write_text("# a comment\ndef g():\n    return 'g'\n", encoding="utf-8")
    before = make_known_sources(patches, {"1.0": old})
    after = add_release(before, patches, "a's 71e418e", [str(library.folder)], only=["lib:f"])
    assert (after.releases, after.package_releases("a's")) == (("1.0",), ("a's 71e418e",))
    assert [*after.targets["lib:f"].values()] == [["1.0"], ["a's 71e418e"]]
    assert {target: row for target, row in after.targets.items() if target != "lib:f"} == {
        target: row for target, row in before.targets.items() if target != "lib:f"
    }
    assert add_release(after, patches, "1.0", old) == after


@pytest.mark.parametrize("name", ["1.0", "a's 71e418e"])
def test_a_single_target_of_what_is_known_already_is_replaced_and_the_others_stay(library, folder_with, name):
    patches = [library.patch(REPLACE_F, METHOD)]
    old = make_known_sources(patches, {"0.9": folder_with("old")})
    before = add_release(old, patches, name, folder_with("old"), only=[] if name == "1.0" else ["lib:f", METHOD.target])
    read = deepcopy(before)
    after = add_release(before, patches, name, folder_with("new"), only=["lib:f"])
    assert before == read, "what was known is not changed in place"
    assert after.releases == before.releases
    assert after.targets[METHOD.target] == before.targets[METHOD.target]
    assert [*after.targets["lib:f"].values()] == [["0.9"], [name]]


def test_targets_that_no_patch_checks_are_left_out(library, folder_with):
    folder = [str(library.folder)]
    before = make_known_sources([library.patch(REPLACE_F, G)], {"1.0": folder})
    after = add_release(before, [library.patch(REPLACE_F)], "1.0", folder)
    assert (set(before.targets), set(after.targets)) == ({"lib:f", "lib2:g"}, {"lib:f"})
