"""A source that nobody has looked at is refused; one that differs in comments and layout only is not."""

from __future__ import annotations

import warnings

import pytest
from megatron_mtp_patches.engine import AddField, AddFlag, Export, Patch, PatchError, Probe, Replace, Wrap
from megatron_mtp_patches.engine.decide import Verdict, decide
from megatron_mtp_patches.engine.engine import Engine
from megatron_mtp_patches.engine.fingerprints import Table, make_table

WATER = Replace("garden:water", "ours:water")
WATER_LINE = 'return f"poured {litres}"'


def verdict(engine, patch: Patch) -> Verdict:
    return decide(patch, engine.installer.table).verdict


def test_a_changed_line_is_refused_and_the_message_says_all(garden):
    engine = garden.engine(garden.patch(WATER))
    file = garden.edit("garden.py", WATER_LINE, 'return f"spilled {litres}"')
    engine.apply("all", "raise")
    with pytest.raises(PatchError) as caught:
        garden.load()
    message = str(caught.value)
    for part in (
        "a-patch is refused",
        "garden:water is not the source of any release",
        str(file),
        "nearest: 1.0",
        "MEGATRON_MTP_PATCHES=-a-patch",
        "MEGATRON_MTP_PATCHES_ON_DRIFT=warn",
        "install a known release",
    ):
        assert part in message


def test_a_refused_import_stays_refused_at_the_second_try(garden):
    engine = garden.engine(garden.patch(WATER))
    garden.edit("garden.py", WATER_LINE, "return 1")
    engine.apply("all", "raise")
    for _ in range(3):
        with pytest.raises(PatchError, match="a-patch is refused"):
            garden.load()


def test_an_import_that_failed_for_its_own_reasons_is_patched_when_it_works(garden):
    engine = garden.engine(garden.patch(WATER))
    garden.edit("garden.py", "import argparse", "import argparse\nimport not_here_yet")
    engine.apply("all", "raise")
    with pytest.raises(ModuleNotFoundError):
        garden.load()
    garden.write("not_here_yet.py", "")
    assert garden.load().water(1) == "our 1"


@pytest.mark.parametrize(
    "old, new",
    [
        (WATER_LINE, f"{WATER_LINE}  # a comment"),
        ('"""Pour."""', '"""Pour a lot."""'),
        ('    """Pour."""\n', ""),
        (WATER_LINE, 'return (\n        f"poured {litres}"\n    )'),
        ("def water(litres):", "\n\ndef water(\n    litres,\n):"),
        (WATER_LINE, "return f'poured {litres}'"),
        ('return f"grew {by}"', "return by"),
    ],
    ids=["comment", "docstring", "no docstring", "parentheses", "layout", "quotes", "another function"],
)
def test_what_does_not_count_is_applied(garden, old, new):
    engine = garden.engine(garden.patch(WATER))
    garden.edit("garden.py", old, new)
    engine.apply("all", "raise")
    assert garden.load().water(1) == "our 1"


@pytest.mark.parametrize(
    "old, new",
    [
        ("def water(litres):", "def water(litres=1):"),
        ("def water(litres):", "def water(liters):"),
        ("def water(litres):", "@staticmethod\ndef water(litres):"),
        (WATER_LINE, f"pass\n    {WATER_LINE}"),
        ("poured {litres}", "poured {litres!r}"),
        ("poured {litres}", "poured {litres:d}"),
        ("poured", "Poured"),
        ("def water(litres):", "async def water(litres):"),
    ],
)
def test_what_counts_is_refused(garden, old, new):
    patch = garden.patch(WATER)
    engine = garden.engine(patch)
    garden.edit("garden.py", old, new)
    assert verdict(engine, patch) is Verdict.REFUSED


def test_a_field_depends_on_how_its_class_is_made_not_on_its_other_fields(garden):
    patch = garden.patch(AddField("garden:Bed", field="depth", type=int, default=1, doc=""))
    engine = garden.engine(patch)
    garden.edit("garden.py", "width: int = 1", "width: int = 1\n    length: int = 2")
    assert decide(patch, engine.installer.table).verdict is Verdict.ADD
    garden.edit("garden.py", "@dataclass\n", "@dataclass(frozen=True)\n")
    assert decide(patch, engine.installer.table).verdict is Verdict.REFUSED


@pytest.mark.parametrize(
    "edit", [Wrap("garden:water", "ours:loudly", any_source=True), AddFlag("garden:water", "--x", int, 1, "")]
)
def test_an_edit_that_leans_on_the_name_alone_needs_the_name(garden, edit):
    patch = garden.patch(edit)
    engine = garden.engine(patch)
    garden.edit("garden.py", WATER_LINE, "return 1")
    assert decide(patch, engine.installer.table).verdict is Verdict.ADD
    garden.edit("garden.py", "def water", "def rain")
    decision = decide(patch, engine.installer.table)
    assert decision.verdict is Verdict.REFUSED and "garden:water is missing in" in decision.reason


def test_a_class_that_is_absent_in_a_known_release_is_known_as_absent(garden):
    greenhouse = Replace("garden:Greenhouse.open", "ours:bloom")
    patch = garden.patch(WATER, greenhouse)
    engine = garden.engine(patch)
    engine.apply("all", "raise")
    assert garden.load().water(1) == "our 1"
    assert engine.installer.report(patch).targets == {
        "garden:water": "applied",
        "garden:Greenhouse.open": "not in this Megatron",
    }
    assert not hasattr(garden.load(), "Greenhouse")


def test_a_class_that_no_known_release_lacks_is_missed(garden):
    patch = garden.patch(WATER)
    engine = garden.engine(patch)
    garden.edit("garden.py", "def water", "def rain")
    decision = decide(patch, engine.installer.table)
    assert decision.verdict is Verdict.REFUSED
    assert "garden:water is missing in" in decision.reason


def test_a_module_that_is_not_installed_is_named(garden):
    patch = garden.patch(Replace("not_installed:f", "ours:water"))
    decision = decide(patch, Table(("1.0",), {}))
    assert decision.verdict is Verdict.REFUSED and "not_installed is not installed" in decision.reason


def test_the_nearest_release_agrees_on_most_targets(garden):
    folder = garden.folder.parent / "old"
    folder.mkdir()
    source = (garden.folder / "garden.py").read_text()
    (folder / "garden.py").write_text(source.replace("poured", "dripped").replace("grew", "shot"))
    patch = garden.patch(WATER, Replace("garden:Tree.grow", "ours:grow"), Replace("garden:Tree.species", "ours:bloom"))
    sources = {"1.0": [str(folder)], "2.0": [str(garden.folder)], "3.0": [str(garden.folder)]}
    data = make_table((patch,), sources)
    table = Table(tuple(data["releases"]), data["targets"])
    assert table.nearest_release((patch,)) == "2.0 or 3.0"
    garden.edit("garden.py", "poured", "dripped")
    assert table.nearest_release((patch,)) == "1.0 or 2.0 or 3.0"
    garden.edit("garden.py", "grew", "shot")
    assert table.nearest_release((patch,)) == "1.0"
    assert table.releases_with("garden:Tree.species", "nonsense") == []


# -- policies ----------------------------------------------------------------------------------------------------


def drifted(garden) -> Engine:
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    bad = garden.patch(WATER, Replace("shed:tool", "ours:bloom"), id="bad")
    engine = garden.engine(bad, garden.patch(Replace("garden:Tree.grow", "ours:grow"), id="good"))
    garden.edit("garden.py", WATER_LINE, "return 'spilled'")
    return engine


def test_warn_warns_once_and_applies_the_others(garden):
    engine = drifted(garden)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.apply("all", "warn")
        module = garden.load()
        garden.load("shed")
    assert len(caught) == 1 and "bad is refused: garden:water" in str(caught[0].message)
    assert (module.water(1), module.Tree().grow()) == ("spilled", "our tree grew 1")


def test_skip_is_silent_and_applies_the_others(garden):
    engine = drifted(garden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.apply("all", "skip")
        module, shed = garden.load(), garden.load("shed")
    assert (module.water(1), module.Tree().grow(), shed.tool()) == ("spilled", "our tree grew 1", "spade")
    report = engine.installer.report(engine.catalog[0])
    assert (report.state, report.targets) == ("refused", {"garden:water": "untouched", "shed:tool": "untouched"})
    assert "garden:water" in report.reason


def test_a_patch_that_is_left_out_is_not_looked_at(garden):
    engine = drifted(garden)
    engine.apply("-bad", "raise")
    assert garden.load().water(1) == "spilled"


# -- probes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe, native",
    [
        (Probe("garden:Tree.grow"), True),
        (Probe("garden:Bed.width"), True),
        (Probe("garden:Tree.shrink"), False),
        (Probe("no_garden:Tree"), False),
        (Probe("garden:Tree.grow", contains="by"), True),
        (Probe("garden:Bed.__post_init__", contains="getattr( self,'depth', 'nothing' )"), True),
        (Probe("garden:Tree.grow", contains="litres"), False),
        (Probe("garden:Tree.shrink", contains="by"), False),
    ],
)
def test_a_probe_sees_in_the_source_whether_the_change_is_there(garden, probe, native):
    bare, repairing = garden.patch(WATER, probe=probe), garden.patch(WATER, probe=probe, repairs=True)
    table = garden.engine(bare).installer.table
    assert decide(bare, table).verdict is (Verdict.NATIVE if native else Verdict.ADD)
    assert decide(repairing, table).verdict is (Verdict.REPAIR if native else Verdict.ADD)


def test_native_is_left_alone_even_if_its_source_is_unknown(garden):
    patch = garden.patch(WATER, probe=Probe("garden:Tree"))
    engine = garden.engine(patch)
    garden.edit("garden.py", WATER_LINE, "return 'native'")
    engine.apply("all", "raise")
    assert garden.load().water(1) == "native"
    assert engine.installer.report(patch).state == "native"


def test_a_repair_needs_a_known_source(garden):
    patch = garden.patch(WATER, probe=Probe("garden:Tree"), repairs=True)
    engine = garden.engine(patch)
    assert decide(patch, engine.installer.table).verdict is Verdict.REPAIR
    engine.apply("all", "raise")
    garden.load()
    assert engine.installer.report(patch).state == "repaired"
    engine.revert()
    garden.edit("garden.py", WATER_LINE, "return 'native'")
    assert decide(patch, engine.installer.table).verdict is Verdict.REFUSED


def test_an_export_needs_no_fingerprint(garden):
    patch = garden.patch(Export("garden:Tree.bloom", "ours:bloom"))
    assert decide(patch, Table(("1.0",), {})).verdict is Verdict.ADD
