"""The words in which a known defect of Megatron is declared. Data only: nothing here reads a source or a run.

A defect is declared once, in a *defects.py of its topic, for every Megatron: its `signs` say how to see in a source
whether that Megatron has it, so a release, a commit that a framework pins and a checkout with cherry-picks each get a
true answer.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_REPOSITORIES = {"ML": "NVIDIA/Megatron-LM", "EO": "NVIDIA-NeMo/Emerging-Optimizers"}  # of ids
T = TypeVar("T")
Kind = Literal["wrong numbers", "wrong log", "lost state", "hang", "crash"]
Evidence = Literal["reproduced", "read", "reported"]
Relation = Literal["", "copies", "cast", "moves", "norm", "batch", "finite"]


def address_of(link: str) -> str:
    """The address of "NVIDIA/Megatron-LM#4047", an issue or a pull request: GitHub leads from this one to either."""
    return f"https://github.com/{link.replace('#', '/issues/')}"


def each(value: T | tuple[T, ...]) -> tuple[T, ...]:
    """One or several, as several."""
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Sign:
    """A place in the source by which a Megatron with a defect is known. All attributes that are given must hold.

    Code is compared after normalisation: formatting, comments and docstrings do not matter.

    Attributes:
        target: a function, class or other name, as `package.module:Qualified.name`, which must exist; no name
            ("package.module:") stands for the whole module.
        has: code that its definition contains, or several pieces.
        lacks: code that its definition does not contain, or several pieces.
    """

    target: str
    has: str | tuple[str, ...] = ()
    lacks: str | tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """Runs from which a patch does not remove its defect.

    Attributes:
        affects: called with the settings of a run that the defect affects; whether the run is one of them.
        when: the same in words: flags, as a user writes them.
        because: why, as the end of a sentence that begins with "because".
    """

    affects: Callable[[Any], object]
    when: str
    because: str


@dataclass(frozen=True)
class Diff:
    """A repair as a few lines in one function of Megatron's, for `export --diff`.

    Attributes:
        target: the function, as `package.module:Qualified.name`.
        code: statements to insert, or the expression that comes "instead of" `anchor`.
        place: where: at the "start" of the function, "before" or "after" the statement with `anchor`, or "inside" the
            block that this statement begins.
        anchor: an expression; the first statement counts that has it, a block without its body.
    """

    target: str
    code: str
    place: Literal["start", "before", "after", "inside", "instead of"] = "start"
    anchor: str = ""

    @property
    def module(self) -> str:
        """The module of the function."""
        return self.target.partition(":")[0]

    @property
    def sign(self) -> Sign:
        """By what a source is known that has it."""
        return Sign(self.target, has=textwrap.dedent(self.code).strip())


@dataclass(frozen=True)
class Defect:
    """Something that goes wrong in runs of some Megatrons.

    Attributes:
        id: "ML-4047" after upstream's pull request or issue, else after what introduced it, with a letter where that
            covers several defects; a name where it is after neither.
        effect: what it does to the numbers, or to the run, in a sentence without a full stop.
        kind: what the user loses.
        severity: 5, the run trains something else or loses what was trained; 4, it trains wrong numbers in common
            runs; 3, it does so in few runs, or ends with an error; 2 and 1, the effect is small or in the log alone.
        signs: code that tells the defect, in one place or several; one match in the source of a Megatron is enough.
        fixed_by: code that tells a fix, or that no run can meet the defect; a match overrides `signs`.
        affects: called with the settings of a run (doctor.findings.RunSettings); whether the defect acts on it, as far
            as settings can tell. It reads each one by its literal name, as in `run.context_parallel_size`.
        when: the same in words: flags, as a user writes them.
        only_if: what settings cannot tell, as the end of a sentence that begins with "if"; '' where they decide.
        instead: what to do instead, without a patch, or the flags to set ("--log-interval 1"); '' where nothing helps
            but the patch or another release.
        state: "fixed in 0.18.0", "fixed on main", "open" (reported, and in no known release fixed) or "unreported",
            without links.
        more_links: upstream's pull requests and issues about the defect, beside that of its id.
        evidence: how sure we are: reproduced by running Megatron, read in its source, or reported by others.
        patch: the id of the patch that removes it; '' for none.
        setting: the setting that has to be on for the patch to remove it, as TransformerConfig or OptimizerConfig calls
            it; '' where it needs none.
        introduced_by: the pull requests that introduced it, "NVIDIA/Megatron-LM#4047", where its id is theirs or a
            reader would look for it there.
        unless: the runs from which the patch does not remove it; None for none.
        diff: the repair as a few lines of Megatron's source, which remove it from the same runs as the patch; None
            where it is larger, or nobody has written it.
        after: the id of another defect: where a run meets both, the patch removes this one only if the other is
            removed as well; '' for none.
        seen_by: the relation of watch-invariants that sees it first in a live run; '' where none is known to. Why
            stands in ci/watch/defects.toml.
        second_reading: what somebody who did not write the declaration has compared with it, as nouns ("sources of
            0.16.1 to main; its program with the flags just outside"); '' where nobody has.
    """

    id: str
    effect: str
    severity: int
    signs: Sign | tuple[Sign, ...]
    affects: Callable[[Any], object]
    when: str
    evidence: Evidence
    kind: Kind = "wrong numbers"
    state: str = "unreported"
    more_links: tuple[str, ...] = ()
    fixed_by: Sign | tuple[Sign, ...] = ()
    only_if: str = ""
    instead: str = ""
    patch: str = ""
    setting: str = ""
    introduced_by: tuple[str, ...] = ()
    unless: Gap | None = None
    diff: Diff | None = None
    after: str = ""
    seen_by: Relation = ""
    second_reading: str = ""

    @property
    def links(self) -> tuple[str, ...]:
        """Upstream's pull requests and issues about the defect, "NVIDIA/Megatron-LM#4047"."""
        number = re.match(r"(ML|EO)-(\d+)", self.id)
        own = number and f"{_REPOSITORIES[number[1]]}#{number[2]}"
        return (own, *self.more_links) if own and own not in self.introduced_by else self.more_links

    def describe_upstream(self, write: Callable[[str], str] = str) -> str:
        """Its links, its state and what introduced it; `write` makes a link of "NVIDIA/Megatron-LM#4047"."""
        links, origin = (", ".join(map(write, names)) for names in (self.links, self.introduced_by))
        return f"{links}{': ' if links else ''}{self.state}{'; introduced by ' if origin else ''}{origin}"

    @property
    def is_fixed(self) -> bool:
        """True if upstream has repaired it, for all runs and on each branch."""
        return self.state.startswith("fixed") and ", open" not in self.state

    @property
    def advice(self) -> str:
        """`instead`, as something to do; '' where nothing helps."""
        return f"set {self.instead}" if self.instead.startswith("--") else self.instead

    @property
    def flag(self) -> str:
        """The flag of `setting`; '' where there is none."""
        return self.setting and f"--{self.setting.replace('_', '-')}"

    @property
    def condition(self) -> str:
        """`when`, and what settings cannot tell."""
        return f"{self.when}, if {self.only_if}" if self.only_if else self.when

    @property
    def range_of_patch(self) -> str:
        """The setting that the patch needs, and the flags with which it does not remove the defect; '' for neither."""
        needed = f" with {self.flag}" if self.flag else ""
        return needed + (f", but not with {self.not_removed_with}" if self.unless else "")

    def ways_out(self, write: Callable[[str], str]) -> str:
        """The patch in its range, or what to do instead; '' for neither. `write` makes the words for the patch's id."""
        patch = self.patch and f"{write(self.patch)}{self.range_of_patch}"
        return "; or ".join(filter(None, (patch, self.instead)))

    @property
    def not_removed_with(self) -> str:
        """The flags of the runs from which the patch does not remove it; '' where it removes it from all."""
        return self.unless.when if self.unless else ""
