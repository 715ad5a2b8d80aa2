"""A run that the configuration of a framework describes, with what is wrong with its settings of the patches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..catalog import CATALOG, SETTINGS
from ..engine.report import states_in
from ..engine.selection import ALL, NONE, REPAIRS
from ..engine.state import State
from .idle_settings import find_idle_settings, find_settings_without_heads
from .places import Places

_DECLARED = {setting.name: setting for setting in SETTINGS.values()}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # what models of Hugging Face call their number
_DTYPES = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}


class Configuration(NamedTuple):
    """A run of a framework.

    Attributes:
        sources: its sections as objects.
        sections: the dotted names and contents of those sections that the user writes.
        places: where its framework has settings of the patches.
        untrained_heads: why no MTP head trains; '' if one does, or if that is not known.
        acting_without_heads: the settings of heads that act all the same.
        hints: what else keeps the settings of the patches from acting.
        patches: which patches it chooses or records, as in MEGATRON_MTP_PATCHES; '' where it does neither.
        shows_patches: something in it shows that the run has the patches.
        is_enabled_by_variable: nothing loads `patches` but `megatron-mtp-patches enable`.
        notes: what is not known of the run.
        content: what its framework makes the run of, as it stands in the file; of verl with its `role`.
    """

    sources: list[SimpleNamespace]
    sections: list[tuple[str, Mapping[Any, Any]]]
    places: Places
    untrained_heads: str = ""
    acting_without_heads: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    patches: str = ""
    shows_patches: bool = True
    is_enabled_by_variable: bool = False
    notes: tuple[str, ...] = ()
    content: dict[str, Any] = {}


def choice_in(record: object) -> str:
    """The patches of a run as in MEGATRON_MTP_PATCHES, by the record that it has left; '' where it has none."""
    if not isinstance(record, str) or not record:
        return ""
    states = states_in(record)
    active = {id for id, state in states.items() if state not in (State.DISABLED, State.REFUSED)}
    if f"profile={REPAIRS}" in record.split():  # what is no repair is applied only if it is named
        chosen = {id for id in active if states[id] in (State.APPLIED, State.PENDING)}
        named = [patch.id for patch in CATALOG if patch.id in chosen and not patch.is_repair]
        left_out = [f"-{patch.id}" for patch in CATALOG if patch.is_repair and patch.id not in active]
        return ",".join([REPAIRS, *named, *left_out])
    left_out = [patch.id for patch in CATALOG if patch.id not in active]
    return NONE if len(left_out) == len(CATALOG) else ",".join(f"-{id}" for id in left_out) or ALL


def make_source(section: Mapping[Any, Any]) -> SimpleNamespace:
    """A section as an object.

    Left out are what YAML needs to make an object of it, settings that are objects of their own, and references to
    other settings (`${...}`) or to variables of a launch script (`$NAME`).
    """
    return SimpleNamespace(
        **{
            str(name): value
            for name, value in section.items()
            if not str(name).startswith("_") and not isinstance(value, dict) and not str(value).startswith("$")
        }
    )


def make_dtype(name: object) -> SimpleNamespace:
    """Megatron's settings for a dtype of torch, such as bfloat16 or torch.bfloat16."""
    return SimpleNamespace(**_DTYPES.get(str(name).removeprefix("torch."), {}))


def read_hugging_face_sizes(folder: object, has_heads: bool) -> tuple[list[SimpleNamespace], tuple[str, ...]]:
    """What defects depend on of a model of Hugging Face: its experts, whether it ties its embeddings and, if it
    `has_heads`, its MTP heads. And a note where it is not here.

    Megatron-Bridge, which makes Megatron's model of it, has experts in a grouped GEMM.
    """
    file = Path(str(folder), "config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        note = f"experts and MTP heads count as absent unless the settings have them: there is no {file} to read"
        return [], (note,)
    config = {**config, **(config.get("text_config") or {})}
    experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
    heads = config.get("num_nextn_predict_layers") if has_heads else None
    sizes = {"num_moe_experts": experts, "moe_grouped_gemm": bool(experts) or None, "mtp_num_layers": heads}
    sizes["share_embeddings_and_output_weights"] = config.get("tie_word_embeddings")
    return [SimpleNamespace(**sizes)], ()


def find_problems(run: Configuration) -> list[str]:
    """Say of each setting of the patches why it does not act or is refused, with the patches that are in force."""
    idle = list(find_idle_settings(((name, _changed(section)) for name, section in run.sections), run.places))
    whole = {"optimizer": "adam"} | {name: one.default for name, one in _DECLARED.items()}
    for source in reversed(run.sources):
        whole |= {name: value for name, value in vars(source).items() if value is not None}
    if run.untrained_heads:
        idle += find_settings_without_heads(_changed(whole), run.acting_without_heads, run.untrained_heads)
    return list(dict.fromkeys([*idle, *_refusals(run, whole)]))


def _changed(settings: Mapping[Any, Any]) -> list[Any]:
    """The names in `settings` but those of settings of the patches that have their defaults."""
    return [
        name
        for name, value in settings.items()
        if name not in _DECLARED or value not in (None, _DECLARED[name].default)
    ]


def _refusals(run: Configuration, whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield why Megatron will refuse settings of the patches, alone in their section and beside all others.

    Both as in the run, where the optimizer's start checks all of them, in `whole`, if the model has MTP heads, and what
    Muon splits in any case.
    """
    from megatron_overrides.muon.fused_weights.checks import check_muon_splits
    from megatron_overrides.settings.checks import check

    try:
        check_muon_splits(SimpleNamespace(**whole))
    except ValueError as error:
        yield str(error)
    heads = whole.get("mtp_num_layers") or 1  # which another section may have; that none trains is said elsewhere
    candidates = [
        make_source({**section, "mtp_num_layers": heads})
        for name, section in run.sections
        if run.places.settings_in(name)
    ]
    if whole.get("mtp_num_layers"):
        candidates.append(SimpleNamespace(**whole))
    for candidate in candidates:
        for name, setting in _DECLARED.items():
            try:
                check(candidate, [setting] if hasattr(candidate, name) else [])
            except ValueError as error:
                yield str(error)
