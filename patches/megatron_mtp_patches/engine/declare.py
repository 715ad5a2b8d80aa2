"""The words in which a patch is declared. Data only: nothing here touches Megatron.

A target is written `package.module:Qualified.name`; so is the override that takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass


class PatchError(RuntimeError):
    """A patch set that cannot be applied as asked; the message says what to change."""

    exit_code = 1


class UsageError(PatchError):
    """A command line that cannot be carried out; the message says what to change."""

    exit_code = 2


@dataclass(frozen=True)
class PullRequest:
    """An upstream change, and the first release that has it (None: no release yet)."""

    number: int
    native_since: str | None = None
    repository: str = "NVIDIA/Megatron-LM"

    def __str__(self) -> str:
        place = "" if self.repository == "NVIDIA/Megatron-LM" else self.repository.partition("/")[2]
        return f"{place}#{self.number}"

    @property
    def url(self) -> str:
        return f"https://github.com/{self.repository}/pull/{self.number}"


@dataclass(frozen=True)
class Edit:
    """One change to one target."""

    target: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """The qualified name inside the module."""
        return self.target.partition(":")[2]

    @property
    def home(self) -> str:
        """The module that the override or the wrapper is in; '' where none is needed."""
        return (getattr(self, "override", "") or getattr(self, "wrapper", "")).partition(":")[0]


@dataclass(frozen=True)
class Replace(Edit):
    """Put `override` where the target is. It must serve every release whose source is known."""

    override: str


@dataclass(frozen=True)
class Wrap(Edit):
    """Call `wrapper(wrapped, instance, args, kwargs)` instead of the target, as wrapt does.

    `any_source`: the wrapper leans on the target's name alone, so a changed body is no reason to refuse.
    """

    wrapper: str
    any_source: bool = False


@dataclass(frozen=True)
class Export(Edit):
    """Add `override` under a name that newer releases have; where the name exists, leave it alone."""

    override: str


@dataclass(frozen=True)
class AddField(Edit):
    """Give the dataclass `target`, and every subclass of it, one more keyword field."""

    field: str
    type: object
    default: object
    doc: str


@dataclass(frozen=True)
class AddFlag(Edit):
    """Add a command-line flag to the argparse parser that the function `target` returns; a switch if `type` is bool."""

    flag: str
    type: object
    default: object
    help: str


@dataclass(frozen=True)
class Probe:
    """How to see in the source that a Megatron has a change: `target` exists and, where `contains` is
    given, its body holds that expression."""

    target: str
    contains: str | None = None


@dataclass(frozen=True)
class Patch:
    """One upstream change for every release.

    `doc` is the header of the module that declares it; its first line is the summary. Where the change is
    native, a patch that `repairs` removes its defects (the header names them); any other leaves it alone.
    An `optional` one patches a package that need not be installed; until it is imported, the patch is pending.
    """

    id: str
    doc: str | None  # None under python -OO
    upstream: tuple[PullRequest, ...]
    probe: Probe | None
    edits: tuple[Edit, ...]
    repairs: bool = False
    optional: bool = False

    @property
    def summary(self) -> str:
        return (self.doc or self.id).strip().partition("\n")[0].rstrip(".")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the edits touch, each once, in order."""
        return tuple(dict.fromkeys(edit.module for edit in self.edits))
