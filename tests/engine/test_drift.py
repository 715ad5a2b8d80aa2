"""An unknown source is refused; one that differs from a known one only in comments and layout is not."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_mtp_patches.engine import AddField, AddFlag, Override, Patch, PatchError, Probe, Project, Wrap
from megatron_mtp_patches.engine.decision import decide
from megatron_mtp_patches.engine.engine import Engine
from megatron_mtp_patches.engine.fingerprints import KnownSources
from megatron_mtp_patches.engine.new_release import make_known_sources
from megatron_mtp_patches.engine.state import State

from .conftest import PROJECT

REPLACE_F = Override("lib:f", "overrides:f")
F_LINE = 'return f"original {x}"'


def known(engine: Engine) -> KnownSources:
    return KnownSources.read(Path(engine.table_file))


def state(engine: Engine, patch: Patch) -> State:
    return decide(patch, known(engine), PROJECT).state


def test_a_changed_line_is_refused_with_the_cause_and_the_ways_out(library):
    engine = library.engine(library.patch(REPLACE_F))
    file = library.edit("lib.py", F_LINE, 'return f"changed {x}"')
    engine.apply("all", "raise")
    with pytest.raises(PatchError) as caught:
        library.load()
    message = str(caught.value)
    for part in (
        "a-patch is refused",
        "lib:f is not the source of any release",
        str(file),
        "nearest: 1.0",
        "`lib-patches drift --against FOLDER --accept NAME --only lib:f`",
        "LIB_PATCHES=-a-patch",
        "LIB_PATCHES_ON_DRIFT=warn",
        "install a known release",
    ):
        assert part in message


def test_a_module_is_patched_once_its_own_import_error_is_fixed(library):
    engine = library.engine(library.patch(REPLACE_F))
    library.edit("lib.py", "import argparse", "import argparse\nimport not_here_yet")
    engine.apply("all", "raise")
    with pytest.raises(ModuleNotFoundError):
        library.load()
    library.write("not_here_yet.py", "")
    assert library.load().f(1) == "override 1"


@pytest.mark.parametrize(
    "old, new",
    [
        (F_LINE, f"{F_LINE}  # a comment"),
        ('"""Docstring."""', '"""Another docstring."""'),
        ('    """Docstring."""\n', ""),
        ("def f(x):", "\n\ndef f(\n    x,\n):"),
        (F_LINE, "return f'original {x}'"),
        ('return f"method {by}"', "return by"),
    ],
    ids=["comment", "docstring", "no docstring", "layout", "quotes", "another function"],
)
def test_a_change_without_effect_is_accepted(library, old, new):
    engine = library.engine(library.patch(REPLACE_F))
    library.edit("lib.py", old, new)
    engine.apply("all", "raise")
    assert library.load().f(1) == "override 1"


@pytest.mark.parametrize(
    "old, new",
    [
        ("def f(x):", "def f(x=1):"),
        ("def f(x):", "def f(y):"),
        ("def f(x):", "@staticmethod\ndef f(x):"),
        (F_LINE, f"pass\n    {F_LINE}"),
        ("original {x}", "original {x!r}"),
        ("original {x}", "original {x:d}"),
        ("original", "Original"),
        ("def f(x):", "async def f(x):"),
    ],
)
def test_a_change_of_behaviour_is_refused(library, old, new):
    patch = library.patch(REPLACE_F)
    engine = library.engine(patch)
    library.edit("lib.py", old, new)
    assert state(engine, patch) is State.REFUSED


def test_an_added_field_depends_on_the_decorators_of_its_class_not_on_the_other_fields(library):
    patch = library.patch(AddField("lib:Config", field="depth", type=int, default=1, doc=""))
    engine = library.engine(patch)
    library.edit("lib.py", "width: int = 1", "width: int = 1\n    length: int = 2")
    assert state(engine, patch) is State.APPLIED
    library.edit("lib.py", "@dataclass\n", "@dataclass(frozen=True)\n")
    assert state(engine, patch) is State.REFUSED


@pytest.mark.parametrize(
    "edit", [Wrap("lib:f", "overrides:add_mark", check_source=False), AddFlag("lib:f", "--x", int, 1, "")]
)
def test_an_unchecked_edit_still_needs_its_target(library, edit):
    patch = library.patch(edit)
    engine = library.engine(patch)
    library.edit("lib.py", F_LINE, "return 1")
    assert state(engine, patch) is State.APPLIED
    library.edit("lib.py", "def f", "def g")
    decision = decide(patch, known(engine), PROJECT)
    assert decision.state is State.REFUSED and "lib:f is missing in" in decision.reason


@pytest.mark.parametrize("where", ["present", "missing", "everywhere"])
def test_a_class_that_a_known_release_lacks_may_be_absent(library, where):
    absent = Override("lib:Absent.method", "overrides:new_method", where=where)
    patch = library.patch(REPLACE_F, absent)
    engine = library.engine(patch)
    engine.apply("all", "raise")
    assert library.load().f(1) == "override 1"
    assert engine.report(patch).targets == {
        "lib:f": "applied",
        "lib:Absent.method": "absent here",
    }
    assert not hasattr(library.load(), "Absent")


def test_a_module_that_is_not_installed_is_named_in_the_refusal(library):
    patch = library.patch(Override("not_installed:f", "overrides:f"))
    decision = decide(patch, KnownSources(("1.0",), {}), PROJECT)
    assert decision.state is State.REFUSED and "not_installed is not installed" in decision.reason


def test_a_patch_of_a_part_that_an_installation_may_lack_waits_for_it(library):
    patch = library.patch(Override("trainer.loop:f", "overrides:f"))
    words = {"package": "lib_patches", "library": "Lib", "library_package": "lib", "repository": "example/lib"}
    cases = ((("other", "trainer"), State.PENDING), (("train",), State.REFUSED), ((), State.REFUSED))
    for parts, state in cases:
        project = Project(**words, optional_parts=parts)
        assert decide(patch, KnownSources(("1.0",), {}), project).state is state


def test_a_patch_without_edits_has_nothing_to_do(library):
    decision = decide(replace(library.patch(REPLACE_F), edits=()), KnownSources(("1.0",), {}), PROJECT)
    assert (decision.state, decision.reason) == (State.NATIVE, "it edits nothing")


def test_a_patch_without_fingerprints_is_told_how_to_get_them(library):
    decision = decide(library.patch(REPLACE_F), KnownSources(("1.0",), {}), PROJECT)
    assert decision.state is State.REFUSED
    assert decision.reason.startswith("lib:f has no known source in any release: the edit is new.")
    assert "drift --against FOLDER --accept RELEASE" in decision.reason


def test_of_another_package_its_own_releases_are_named(library):
    """It need not be installed; where it is, its source is checked as the library's is."""
    patch = replace(library.patch(Wrap("lib2:g", "overrides:add_mark")), package="a-package")
    patches = (library.patch(REPLACE_F), patch)
    sources = make_known_sources(patches, {"1.0": [str(library.folder)], "a-package 2.0": [str(library.folder)]})
    decision = decide(patch, sources, PROJECT)
    assert (decision.state, decision.reason) == (State.APPLIED, "this a-package lacks it")
    library.write("lib2.py", "def g():\n    return 'h'\n")
    decision = decide(patch, sources, PROJECT)
    assert decision.state is State.REFUSED
    assert "Known: a-package 2.0; nearest: a-package 2.0. " in decision.reason
    (library.folder / "lib2.py").unlink()
    importlib.invalidate_caches()
    decision = decide(patch, sources, PROJECT)
    assert (decision.state, decision.reason) == (State.PENDING, "lib2 is not installed")


def test_another_folder_can_be_asked(library, tmp_path):
    patch = library.patch(REPLACE_F, probe=Probe("lib:g"), repairs=("A defect.",))
    sources = known(library.engine(patch))
    states = {}
    for line in ("def f", "def g(): pass\ndef f", "def f1"):
        folder = tmp_path / str(len(states))
        folder.mkdir()
        text = (library.folder / "lib.py").read_text(encoding="utf-8").replace("def f", line)
        (folder / "lib.py").write_text(text, encoding="utf-8")
        decision = decide(patch, sources, PROJECT, [str(folder)])
        states[decision.state] = decision.reason
    assert list(states) == [State.APPLIED, State.REPAIRED, State.REFUSED]
    assert str(folder / "lib.py") in states[State.REFUSED]


def test_the_nearest_release_is_the_one_that_agrees_on_most_targets(library):
    folder = library.folder.parent / "old"
    folder.mkdir()
    source = (library.folder / "lib.py").read_text()
    (folder / "lib.py").write_text(source.replace("original", "older").replace("method {by}", "older {by}"))
    patch = library.patch(
        REPLACE_F, Override("lib:C.method", "overrides:method"), Override("lib:C.static", "overrides:new_method")
    )
    sources = {"1.0": [str(folder)], "2.0": [str(library.folder)], "3.0": [str(library.folder)]}
    releases = make_known_sources((patch,), sources)
    assert releases.nearest_release((patch,)) == "2.0 or 3.0"
    library.edit("lib.py", "original", "older")
    assert releases.nearest_release((patch,)) == "1.0 or 2.0 or 3.0"
    library.edit("lib.py", "method {by}", "older {by}")
    assert releases.nearest_release((patch,)) == "1.0"
    assert releases.releases_with("lib:C.static", "nonsense") == []


# -- probes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe, native",
    [
        (Probe("lib:C.method"), True),
        (Probe("lib:Config.width"), True),
        (Probe("lib:C.absent"), False),
        (Probe("no_lib:C"), False),
        (Probe("lib:C.method", contains="by"), True),
        (Probe("lib:Config.__post_init__", contains="getattr( self,'depth', 'nothing' )"), True),
        (Probe("lib:C.method", contains="x"), False),
    ],
)
def test_a_probe_sees_in_the_source_whether_the_change_is_there(library, probe, native):
    bare = library.patch(REPLACE_F, probe=probe)
    repairing = library.patch(REPLACE_F, probe=probe, repairs=("A defect.",))
    sources = known(library.engine(bare))
    assert decide(bare, sources, PROJECT).state is (State.NATIVE if native else State.APPLIED)
    assert decide(repairing, sources, PROJECT).state is (State.REPAIRED if native else State.APPLIED)
