"""Runs in a process of its own: look at Megatron before, under and after the patches, and report it as JSON.

What is applied is read from the objects themselves, not from what the engine says of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import sys
import warnings
from types import ModuleType

MISSING = "missing"
# What a configuration cannot be made without.
NEEDED = {"num_layers", "hidden_size", "num_attention_heads"}

# What Megatron-Bridge, mcore-bridge, ms-swift and verl take by value of what the patches touch, and when.
BY_NAME = {
    "megatron.core": ["DistributedDataParallel", "ModelParallelConfig"],
    "megatron.core.distributed": ["DistributedDataParallel"],
    "megatron.core.models.common.language_module.language_module": ["LanguageModule"],
    "megatron.core.models.gpt": ["GPTModel"],
    "megatron.core.models.gpt.gpt_model": ["GPTModel"],
    "megatron.core.optimizer": [
        "ChainedOptimizer",
        "DistributedOptimizer",
        "OptimizerConfig",
        "get_megatron_optimizer",
    ],
    "megatron.core.optimizer.layer_wise_optimizer": ["LayerWiseDistributedOptimizer"],
    "megatron.core.optimizer.optimizer": ["ChainedOptimizer"],
    "megatron.core.optimizer.qk_clip": ["clip_qk"],
    "megatron.core.transformer": ["TransformerConfig"],
    "megatron.core.transformer.multi_token_prediction": [
        "MTPLossLoggingHelper",
        "MultiTokenPredictionBlock",
        "MultiTokenPredictionLayer",
        "_compute_mtp_acceptance_counts",
        "process_mtp_loss",
        "roll_tensor",
    ],
    "megatron.training.arguments": ["validate_args", "add_megatron_arguments"],
}


def declared():
    """Every patch, the base set included; importing it applies the set."""
    from megatron_mtp_patches.catalog import BASE, CATALOG

    return (*BASE, *CATALOG)


def import_targets(patches) -> None:
    from megatron_mtp_patches.engine.source import find_file

    for patch in patches:
        for module in patch.modules:
            if find_file(module):
                importlib.import_module(module)


def find_owner(edit):
    """The object that holds the target, and the target's name there; None where this Megatron has no such object."""
    module = sys.modules.get(edit.module)
    *parents, name = edit.name.split(".")
    try:
        return functools.reduce(getattr, parents, module), name
    except AttributeError:
        return None, name


def count(edit) -> int | str | None:
    """How often the edit is in force; None: no such target here; "native": no Export or field was needed."""
    from megatron_mtp_patches.engine import AddField, AddFlag, Export, Replace, Wrap
    from megatron_mtp_patches.engine.slots import load

    owner, name = find_owner(edit)
    if owner is None or (name not in vars(owner) and not isinstance(edit, Export)):
        return None
    value = vars(owner).get(name)
    layers = [value]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    if isinstance(edit, Export):
        return "native" if value is not None and value is not load(edit.override) else int(value is not None)
    if isinstance(edit, Replace):
        return sum(layer is load(edit.override) for layer in layers)  # wraps may lie around it
    if isinstance(edit, Wrap):
        wrapper = load(edit.wrapper)
        return sum(getattr(layer, "_self_wrapper", None) is wrapper for layer in layers)
    if isinstance(edit, AddField):
        fields = [field for field in dataclasses.fields(value) if field.name == edit.field]
        if fields:
            needed = dict.fromkeys(NEEDED.intersection(inspect.signature(value).parameters), 1)
            assert getattr(value(**needed, **{edit.field: 0.5}), edit.field) == 0.5
            assert getattr(value(**needed), edit.field) == edit.default
            assert inspect.signature(value).parameters[edit.field].default == edit.default
        return "native" if any("added_in_place" not in field.metadata for field in fields) else len(fields)
    assert isinstance(edit, AddFlag)
    parser = value(argparse.ArgumentParser(conflict_handler="error", allow_abbrev=False))
    action = parser._option_string_actions.get(edit.flag)
    if action:
        assert (action.default, action.type or bool) == (edit.default, edit.type)
    return sum(edit.flag in action.option_strings for action in parser._actions)


def name_added(edit) -> list[str]:
    return [getattr(edit, kind) for kind in ("field", "flag") if hasattr(edit, kind)]


def describe() -> dict:
    """State, and how often each edit is in force, of every patch."""
    import megatron_mtp_patches

    reports = {report.id: report for report in megatron_mtp_patches.status()}
    found = {}
    for patch in declared():
        edits = [" ".join([type(edit).__name__, edit.target, *name_added(edit)]) for edit in patch.edits]
        report = reports.get(patch.id)
        found[patch.id] = {
            "state": report and report.state,
            "targets": report and report.targets,
            "counts": dict(zip(edits, map(count, patch.edits), strict=True)),
        }
    return found


def snapshot(patches) -> list[tuple]:
    """What every owner of a target, and every class that inherits from one, holds."""
    owners = {}
    for edit in (edit for patch in patches for edit in patch.edits):
        owner, name = find_owner(edit)
        if owner is None:
            continue
        owners[id(owner)] = owner
        value = vars(owner).get(name)
        for cls in family(owner) + family(value):
            owners[id(cls)] = cls
    fields = [dict(owner.__dataclass_fields__) for owner in owners.values() if hasattr(owner, "__dataclass_fields__")]
    return [(owner, dict(vars(owner))) for owner in owners.values()] + [(None, names) for names in fields]


def family(cls) -> list[type]:
    if not isinstance(cls, type):
        return []
    return [cls, *(member for child in cls.__subclasses__() for member in family(child))]


def differences(before: list[tuple], after: list[tuple]) -> list[str]:
    """The names that are not bound to the same object any more."""
    assert [owner for owner, _ in before] == [owner for owner, _ in after]
    return [
        f"{getattr(owner, '__name__', 'fields')}.{name}"
        for (owner, old), (_, new) in zip(before, after, strict=True)
        for name in old.keys() | new.keys()
        if old.get(name, MISSING) is not new.get(name, MISSING)
        and name not in ("__abstractmethods__", "__warningregistry__")
    ]


def make_user() -> ModuleType:
    """A module that did `from megatron... import ...`."""
    user = ModuleType("user_of_megatron")
    sys.modules[user.__name__] = user
    for module, names in BY_NAME.items():
        with contextlib.suppress(ModuleNotFoundError):
            loaded = importlib.import_module(module)
            vars(user).update({name: vars(loaded)[name] for name in names if name in vars(loaded)})
    return user


def stale(user: ModuleType) -> list[str]:
    """The names of the user's that are not what Megatron has under that name now."""
    return [
        name
        for module, names in BY_NAME.items()
        for name in names
        if hasattr(user, name) and vars(user)[name] is not vars(sys.modules[module])[name]
    ]


# -- scenarios ---------------------------------------------------------------------------------------------------


def before_megatron() -> dict:
    """The patches first, then Megatron; then apply them again, without a revert."""
    import megatron_mtp_patches

    loaded = [name for name in ("torch", "megatron", "megatron.core") if name in sys.modules]
    pending = {report.id: report.state for report in megatron_mtp_patches.status()}
    import_targets(declared())
    first = describe()
    megatron_mtp_patches.apply()
    import_targets(declared())
    return {"loaded": loaded, "pending": pending, "found": first, "again": describe(), "recorded": recorded()}


def with_transformer_engine() -> dict:
    return _with("transformer_engine", "apex")


def with_apex() -> dict:
    return _with("apex")


def _with(*libraries: str) -> dict:
    """As before_megatron, where these libraries seem to be installed; and what Megatron has taken of them."""
    import fused_libraries

    fused_libraries.install(*libraries)
    import_targets(declared())
    found = describe()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import Adam

    taken = {"Adam": Adam.__module__, "TE": gpt_layer_specs.HAVE_TE, "Apex": gpt_layer_specs.HAVE_APEX}
    return {"found": found, "taken": taken}


def recorded() -> list | None:
    """What validate_args leaves in the arguments, and the record it should be."""
    import megatron_mtp_patches

    with contextlib.suppress(ModuleNotFoundError):
        from megatron.training.arguments import validate_args

        for call in (lambda args: validate_args(args), lambda args: validate_args(args=args)):
            args = argparse.Namespace()
            with contextlib.suppress(AttributeError):  # Megatron's own body misses the other arguments
                call(args)
        return [args.megatron_mtp_patches, megatron_mtp_patches.record()]
    return None


def after_megatron(list_of_modules: str) -> dict:
    """Megatron and a user of its names first, then the patches: none of them, all, out again, and in again."""
    modules = [importlib.import_module(name) for name in list_of_modules.split(",")]
    user = make_user()
    taken = dict(vars(user))
    contents = hold(modules)

    os.environ["MEGATRON_MTP_PATCHES"] = "none"
    import megatron_mtp_patches
    from megatron_mtp_patches.catalog import BASE

    report = {"under_none": changed_names(contents, modules)}
    report["none_states"] = sorted({patch.state for patch in megatron_mtp_patches.status()})
    # The base set, which makes the ranks agree and keeps the record, is there even so.
    report["base"] = sorted(edit.target for patch in BASE for edit in patch.edits if count(edit) == 1)
    megatron_mtp_patches.revert()
    report["after_none"] = changed_names(contents, modules)

    original = snapshot(declared())
    del os.environ["MEGATRON_MTP_PATCHES"]
    megatron_mtp_patches.apply()
    report["found"] = describe()
    report["changed"] = differences(original, snapshot(declared()))
    report["stale"] = stale(user)
    report["followed"] = [name for name, value in vars(user).items() if value is not taken[name]]
    megatron_mtp_patches.revert()
    report["left"] = differences(original, snapshot(declared())) + changed_names(contents, modules)
    report["stale"] += stale(user)
    report["reverted"] = {patch.id: patch.state for patch in megatron_mtp_patches.status()}
    megatron_mtp_patches.apply()
    report["again"] = describe()
    megatron_mtp_patches.revert()
    report["left_again"] = differences(original, snapshot(declared())) + changed_names(contents, modules)
    return report


def hold(modules: list[ModuleType]) -> dict[str, object]:
    """Every name in these modules, and in their classes, with what it is bound to."""
    held: dict[str, object] = {}
    for module in modules:
        held |= {f"{module.__name__}:{name}": value for name, value in vars(module).items()}
        for cls in (value for value in vars(module).values() if isinstance(value, type)):
            held |= {f"{cls.__module__}:{cls.__qualname__}.{name}": value for name, value in vars(cls).items()}
    return held


def changed_names(before: dict[str, object], modules: list[ModuleType]) -> list[str]:
    after = hold(modules)
    passing = ("__annotations__", "__abstractmethods__", "_abc_impl", "__warningregistry__")
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name, MISSING) is not after.get(name, MISSING) and not name.endswith(passing)
    )


def drifted(module: str) -> dict:
    """Import a Megatron in which one module has a changed line: refused each time, and skipped on request."""
    import megatron_mtp_patches

    errors = []
    for _ in range(2):
        try:
            importlib.import_module(module)
        except megatron_mtp_patches.PatchError as error:
            errors.append(str(error))
    file = getattr(sys.modules.get(module), "__file__", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        megatron_mtp_patches.apply(on_drift="warn")
        import_targets(declared())
    warned = [str(warning.message) for warning in caught if "megatron_mtp_patches" in str(warning.message)]
    return {"errors": errors, "file": file, "warned": warned, "found": describe()}


def judge_sources(list_of_folders: str) -> dict:
    """The verdict on every patch in each of these Megatrons, from source alone."""
    from megatron_mtp_patches import _engine
    from megatron_mtp_patches.catalog import CATALOG
    from megatron_mtp_patches.engine import source
    from megatron_mtp_patches.engine.decide import decide

    verdicts = {}
    for folder in filter(None, list_of_folders.split(",")):
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        decisions = {patch.id: decide(patch, _engine.installer.table) for patch in CATALOG}
        verdicts[folder] = {name: [decision.verdict.value, decision.reason] for name, decision in decisions.items()}
        sys.path.remove(folder)
        source._parse.cache_clear()
    imported = [name for name in sys.modules if name.partition(".")[0] in ("torch", "megatron")]
    return {"verdicts": verdicts, "imported": imported}


if __name__ == "__main__":
    scenarios = (before_megatron, after_megatron, with_transformer_engine, with_apex, drifted, judge_sources)
    named = {scenario.__name__: scenario for scenario in scenarios}
    print(json.dumps(named[sys.argv[1]](*sys.argv[2:])))
