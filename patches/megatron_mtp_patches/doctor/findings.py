"""The known defects of a Megatron that affect a run, and the patch that removes each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..catalog import CATALOG
from ..defects.catalog import known_defects, releases_with, remover_of, span_of
from ..defects.declare import Defect, each
from ..defects.probe import has_defect
from ..engine import Patch
from ..engine.source import find_file
from ..engine.state import State
from ..megatron_engine import ENGINE

# What Megatron's configurations call differently from its command line.
OTHER_NAMES = {"num_experts": "num_moe_experts"}
# What Megatron-Bridge says the other way round.
_OPPOSITES = {f"no_{name}": name for name in ("load_optim", "load_rng", "save_optim", "save_rng")}
_OPPOSITES["untie_embeddings_and_output_weights"] = "share_embeddings_and_output_weights"


class RunSettings:
    """The settings of a run, as one object: Megatron's arguments, or the configurations of a trainer.

    An attribute is that of the first of the `sources` that has it and is not None; None where there is none.

    Attributes:
        transformer_engine: its version as numbers, (2, 16, 1); () where there is none.
        is_of_megatron_trainer: whether Megatron's own parser has read them, so that Megatron's trainer runs.
    """

    def __init__(self, sources: Iterable[object], transformer_engine: str | None) -> None:
        self._sources = tuple(sources)
        self.transformer_engine = tuple(map(int, re.findall(r"\d+", transformer_engine or "")[:3]))
        self.is_of_megatron_trainer = any(hasattr(source, "yaml_cfg") for source in self._sources)

    def __getattr__(self, name: str) -> Any:
        names = (name, OTHER_NAMES.get(name, name))
        values = (getattr(source, one, None) for source in self._sources for one in names)
        value = next((value for value in values if value is not None), None)
        if value is None and name in _OPPOSITES:
            opposite = getattr(self, _OPPOSITES[name])
            return None if opposite is None else not opposite
        return value


@dataclass(frozen=True)
class Finding:
    """A defect that affects a run.

    Attributes:
        id: of the defect.
        text: what it does, in a sentence without a full stop.
        kind: "wrong numbers", "wrong log", "lost state", "hang" or "crash".
        severity: 5 (trains something else) to 1 (a number in the log).
        evidence: it was reproduced, read in the source, or reported by others.
        only_if: what the settings of a run and the sources here cannot tell; '' where they decide.
        releases: the first and the last known release that has it.
        patch: the id of the patch that removes it; None if none does.
        is_removed: that patch is applied, or will be as soon as the package that it patches is installed; the run has
            the setting that the patch needs, and is none of those from which the patch does not remove it.
        remedy: what to do if the defect is not removed, or not yet; '' if there is nothing to do.
    """

    id: str
    text: str
    kind: str
    severity: int
    evidence: str
    only_if: str
    releases: str
    patch: str | None
    is_removed: bool
    remedy: str


def check_version(version: object) -> None:
    """Raise ValueError if this is not a version as 2.16.1 or 2.17.0.dev0+abc."""
    if not isinstance(version, str) or not re.fullmatch(r"\d+(\.\d+)+(\.?(dev|post|rc|a|b)\d*)*(\+[\w.]+)?", version):
        raise ValueError(f"{version!r} is not a version of TransformerEngine: write it as '2.16.1'")


def diagnose_sources(sources: Iterable[object], transformer_engine: str | None) -> list[Finding]:
    """Return the findings of `find_defects` on the installed Megatron and, if no version is given, TransformerEngine.

    Raises:
        TypeError: a source is no object with settings as attributes, or there is none.
        ValueError: `transformer_engine` is not a version.
    """
    sources = tuple(sources)
    wrong = [one for one in sources if one is None or isinstance(one, (type, Mapping, list, tuple, str))]
    if wrong or not sources:
        raise TypeError(
            f"diagnose() takes Megatron's arguments or configurations, not {wrong[0] if wrong else 'nothing'!r}; make "
            f"an object of a mapping with types.SimpleNamespace(**mapping)"
        )
    if transformer_engine is not None:
        check_version(transformer_engine)
        return list(find_defects(RunSettings(sources, transformer_engine)))
    return list(find_defects(settings_here(sources)))


def settings_here(sources: Iterable[object]) -> RunSettings:
    """The settings of a run in this environment, with the TransformerEngine that `diagnose_sources` takes."""
    from ..megatrons.installed import find_releases, find_transformer_engine

    return RunSettings(sources, find_transformer_engine(find_releases())[0])


def find_defects(settings: RunSettings, known: Iterable[Defect] | None = None) -> Iterator[Finding]:
    """The defects of the installed Megatron that affect a run with these settings, the most severe first.

    `known` are those that are looked for; None for all.
    """
    known = known_defects() if known is None else known
    defects = [one for one in known if one.affects(settings) and _may_have(one, settings)]  # a run is read quicker
    findings = {one.id: _judge(one, remover_of(one, CATALOG), settings) for one in defects}
    for defect in defects:
        finding, other = findings[defect.id], findings.get(defect.after)
        if finding.is_removed and other and not other.is_removed:
            remedy = f"{finding.patch} removes it only where {other.id} is removed as well: {other.remedy}"
            finding = replace(finding, is_removed=False, remedy=remedy)
        yield finding


def _may_have(defect: Defect, settings: RunSettings) -> bool:
    """Whether this Megatron has it; where a wheel lacks the script that shows it, whether the script of its release."""
    from ..megatrons.installed import find_releases

    answer = has_defect(defect)
    if answer is None and settings.is_of_megatron_trainer:
        return bool(_missing_script(defect) and find_releases().intersection(releases_with(defect)))
    return bool(answer)


def _missing_script(defect: Defect) -> str:
    """The script of Megatron's repository that would show a defect and is not on the path; '' if there is none."""
    modules = (sign.target.partition(":")[0] for sign in each(defect.signs))
    return next((f"{name}.py" for name in modules if "." not in name and find_file(name) is None), "")


def _condition(defect: Defect) -> str:
    """What the settings of a run, and the sources that are here, cannot tell."""
    script = "" if has_defect(defect) else _missing_script(defect)
    unread = f"its {script}, which is not on PYTHONPATH here, is that of the release" if script else ""
    return " and ".join(filter(None, (defect.only_if, unread)))


def _judge(defect: Defect, patch: Patch | None, settings: RunSettings) -> Finding:
    if patch:
        is_removed, remedy = _is_removed_by(patch)
        if is_removed and defect.setting and not getattr(settings, defect.setting):
            ways = [f"add {defect.flag} ({patch.id})", defect.advice]
            is_removed, remedy = False, ", or ".join(filter(None, ways))
        elif is_removed and defect.unless and defect.unless.affects(settings):
            reason = f"{patch.id} does not remove it here, because {defect.unless.because}"
            is_removed, remedy = False, f"{reason}; {_without_patch(defect)}"
    else:
        is_removed, remedy = False, f"no patch; {_without_patch(defect)}"
    return Finding(
        id=defect.id,
        text=defect.effect,
        kind=defect.kind,
        severity=defect.severity,
        evidence=defect.evidence,
        only_if=_condition(defect),
        releases=span_of(defect),
        patch=defect.patch or None,
        is_removed=is_removed,
        remedy=remedy,
    )


def _without_patch(defect: Defect) -> str:
    return f"instead {defect.advice}" if defect.instead else "no other setting is known to avoid it"


def _is_removed_by(patch: Patch) -> tuple[bool, str]:
    """(whether a patch removes its defects, what to do or to know)."""
    report = ENGINE.report(patch)
    if report.state is State.DISABLED:
        return False, f"{patch.id} is {report.reason}"
    if report.state is State.REFUSED:
        return False, f"{patch.id} is refused: {report.reason}"
    if report.state is State.PENDING and patch.package and not any(map(find_file, patch.modules)):
        return True, f"it applies once {patch.package} is installed"
    return True, ""
