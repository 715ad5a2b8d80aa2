"""The patches that a framework's run can leave out, each with a setting that does not act then."""

from importlib.util import find_spec
from pathlib import Path

from megatron_mtp_patches.catalog import CATALOG, SETTINGS
from megatron_mtp_patches.engine import AddField


def leave_out(places, *packages):
    """[(the id of a patch, a setting)]: those of settings, those of these packages, whose setting may be ''."""
    cases = {patch.id: "" for patch in CATALOG if patch.package in packages}
    for patch in CATALOG:
        settings = {edit.setting for edit in patch.edits if isinstance(edit, AddField) and edit in SETTINGS}
        for setting in settings:
            if any(setting.name in names for names in places.sections.values()) and not setting.choices:
                carriers = places.carriers.get(setting.name, ())
                cases |= {one: min(cases.get(one) or setting.name, setting.name) for one in (patch.id, *carriers)}
    return list(cases.items())


def is_megatrons_own(setting):
    """Whether this Megatron has the field without the patches."""
    files = ("transformer/transformer_config.py", "optimizer/optimizer_config.py")
    (core,) = find_spec("megatron.core").submodule_search_locations
    return any(f"\n    {setting}: " in Path(core, file).read_text() for file in files)


def says_why(output, patch, setting):
    return describe(patch, setting) in output


def describe(patch, setting):
    """Why the setting does not act, but for the choice of patches to set."""
    return f"{setting} does not act without {patch}, left out by MEGATRON_MTP_PATCHES: set "
