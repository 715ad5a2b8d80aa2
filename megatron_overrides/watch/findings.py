"""What a watch has found, in words, and what becomes of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_overrides.norms.step_state import StepState
from megatron_overrides.watch.rank_checks import Flaw
from megatron_overrides.watch.relations import RELATIONS, ROUNDING

logger = logging.getLogger(__name__)
SHOWN = 5  # names of a finding


class WatchError(RuntimeError):
    """A relation that must hold in every run does not hold in this one."""


class Finding(NamedTuple):
    """A relation that does not hold.

    Attributes:
        relation: its name.
        names: the first tensors.
        total: how many there are; of those that ranks find by themselves, on the rank that has most.
        detail: what is wrong with the first of them, as the end of a sentence.
    """

    relation: str
    names: list[str]
    total: int
    detail: str

    def describe(self, step: int) -> str:
        shown = "; ".join(self.names[:SHOWN])
        others = f" and {self.total - SHOWN} more" if self.total > SHOWN else ""
        return f"watch, step {step}: {self.relation}: {shown}{others}: {self.detail}"


class Findings:
    """The findings of a run.

    Args:
        action: "warn" of the first finding of each relation, or "raise"; copies that differ by rounding only warn.
        state: of the optimizer; its `watch_findings` counts all of them.
        settings: the configurations of the run, by which known defects are looked for.
    """

    def __init__(self, action: str, state: StepState, settings: Sequence[object]) -> None:
        self._action = action
        self._state = state
        self._settings = settings
        self._said: set[str] = set()
        state.watch_findings = 0

    def report(self, findings: list[Finding], step: int) -> None:
        """Warn or raise on all ranks, which have the same findings.

        Raises:
            WatchError: there are findings other than rounding, and the action is "raise".
        """
        self._state.watch_findings = (self._state.watch_findings or 0) + len(findings)
        errors = [finding for finding in findings if finding.relation != ROUNDING]
        if errors and self._action == "raise":
            raise WatchError("\n".join(one.describe(step) + self._name_causes(one) for one in errors))
        for finding in findings:
            if not self.has_said(finding.relation):
                self._said.add(finding.relation)
                if dist.get_rank() == 0:
                    later = "; later ones of this kind are counted and not said"
                    logger.warning(finding.describe(step) + self._name_causes(finding) + later)

    def has_said(self, relation: str) -> bool:
        """True if a finding of this relation is only counted."""
        return relation in self._said

    def _name_causes(self, finding: Finding) -> str:
        """The known defects that the finding may come from, as a further part of its line; '' for none."""
        from megatron_mtp_patches.doctor.causes import name_causes  # reads sources of Megatron

        return name_causes(RELATIONS.get(finding.relation), self._settings)


def gather(flaws: list[Flaw]) -> list[Finding]:
    """The flaws of all ranks as findings, the same on all of them. One all-reduce, and more only if there are any."""
    count = torch.tensor([len(flaws)], device="cuda")
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    if not int(count):
        return []
    ours: dict[str, list[Flaw]] = {}
    for flaw in flaws:
        ours.setdefault(flaw.relation, []).append(flaw)
    # Of thousands of ranks each sends a few, for all of them may have a NaN in each weight.
    few = [(len(alike), alike[:SHOWN]) for alike in ours.values()]
    gathered: list[list[tuple[int, list[Flaw]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, few)
    ranks: dict[str, dict[str, list[int]]] = {}
    counts: dict[str, int] = {}
    details: dict[str, str] = {}
    for rank, theirs in enumerate(gathered):
        for size, shown in theirs:
            relation = shown[0].relation
            counts[relation] = max(size, counts.get(relation, 0))
            details.setdefault(relation, shown[0].detail)
            for flaw in shown:
                ranks.setdefault(relation, {}).setdefault(flaw.name, []).append(rank)
    findings = []
    for relation, ranks_of in ranks.items():
        names = sorted(ranks_of, key=lambda name: name.startswith("gradient "))  # they come from weights
        detail = f"{details[relation]} (first one: {describe_ranks(ranks_of[names[0]])})"
        findings.append(Finding(relation, names, max(counts[relation], len(names)), detail))
    return findings


def describe_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
