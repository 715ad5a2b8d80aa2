"""What a watch has found, in words, and what becomes of the run."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from megatron.core.utils import log_single_rank

logger = logging.getLogger(__name__)
SHOWN = 5  # names of a finding


class WatchError(RuntimeError):
    """A relation that must hold in every run does not hold in this one."""


class Finding(NamedTuple):
    """A relation that does not hold.

    Attributes:
        relation: its name.
        names: the tensors.
        detail: what is wrong with the first of them, as the end of a sentence.
    """

    relation: str
    names: list[str]
    detail: str

    def describe(self, step: int) -> str:
        shown = "; ".join(self.names[:SHOWN])
        others = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        return f"watch, step {step}: {self.relation}: {shown}{others}: {self.detail}"


class Findings:
    """The findings of a run.

    Args:
        action: "warn" of the first finding of each relation and count the others, or "raise".
    """

    def __init__(self, action: str) -> None:
        self.action = action
        self.counts: Counter[str] = Counter()

    def report(self, findings: list[Finding], step: int) -> None:
        """Warn or raise on all ranks, which have the same findings.

        Raises:
            WatchError: there are findings, and the action is "raise".
        """
        for finding in findings:
            self.counts[finding.relation] += 1
            if self.action == "raise":
                raise WatchError(finding.describe(step))
            if self.counts[finding.relation] == 1:
                later = "; later ones of this kind are counted in the log line alone"
                log_single_rank(logger, logging.WARNING, finding.describe(step) + later)
