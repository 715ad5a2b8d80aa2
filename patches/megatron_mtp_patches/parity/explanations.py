"""The known defects that may explain a finding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..doctor.findings import Finding, RunSettings, find_defects
from .samples import WHOLE

WRONG_LOG, LOST_STATE, CRASH = "wrong log", "lost state", "crash"
KINDS = {"wrong numbers", WRONG_LOG}


def known_explanations(cut: dict[str, Any], reference: dict[str, Any], data: str) -> list[tuple[Finding, bool]]:
    """The known defects that change numbers of the cut, and that the patches of this process leave.

    Each with whether it affects the reference as well, where it may do something else; these come last.

    Args:
        cut, reference: Megatron's arguments after its own checks, by name.
        data: the kind of samples: uneven ones leave tokens out of the loss, as --eod-mask-loss does.
    """
    acting = [one for one in find_defects(_settings(cut, data)) if one.kind in KINDS and not one.is_removed]
    in_reference = {one.id for one in find_defects(_settings(reference, data))}
    return sorted(((one, one.id in in_reference) for one in acting), key=lambda pair: pair[1])


def known_explanations_of_resume(arguments: dict[str, Any], data: str) -> list[Finding]:
    """The known defects that change a resume with these arguments, and that the patches of this process leave."""
    return _acting(arguments, data, {*KINDS, LOST_STATE})


def known_explanations_of_refusal(arguments: dict[str, Any], data: str) -> list[Finding]:
    """The same of the defects by which saving or loading ends in an error."""
    return _acting(arguments, data, {CRASH, LOST_STATE})


def _acting(arguments: dict[str, Any], data: str, kinds: set[str]) -> list[Finding]:
    return [one for one in find_defects(_settings(arguments, data)) if one.kind in kinds and not one.is_removed]


def _settings(arguments: dict[str, Any], data: str) -> RunSettings:
    from ..megatrons.installed import find_releases, find_transformer_engine

    masks = SimpleNamespace(eod_mask_loss=True) if data != WHOLE else SimpleNamespace()
    version, _ = find_transformer_engine(find_releases())
    return RunSettings([masks, SimpleNamespace(**arguments)], version)
