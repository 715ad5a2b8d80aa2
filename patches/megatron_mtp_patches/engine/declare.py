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
    """An upstream change.

    Attributes:
        number: of the pull request.
        native_since: the first release that has it; None where no release has.
        repository: its owner and name on GitHub.
        twin_of: the number of another one that brings the same change, for another branch.
    """

    number: int
    native_since: str | None = None
    repository: str = "NVIDIA/Megatron-LM"
    twin_of: int | None = None

    def __str__(self) -> str:
        place = "" if self.repository == "NVIDIA/Megatron-LM" else self.repository.partition("/")[2]
        return f"{place}#{self.number}"

    @property
    def fate(self) -> str:
        """What became of it."""
        if self.twin_of:
            return f"the same as #{self.twin_of}"
        return f"since {self.native_since}" if self.native_since else "in no release"

    @property
    def url(self) -> str:
        """Where it can be read."""
        return f"https://github.com/{self.repository}/pull/{self.number}"


@dataclass(frozen=True)
class Edit:
    """One change to one target.

    Attributes:
        target: what is changed, as `package.module:Qualified.name`.
    """

    target: str

    @property
    def module(self) -> str:
        """The module that is changed."""
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
    """Put something else where the target is.

    Attributes:
        override: `module:name` of what takes its place. It must serve every release whose source is known.
    """

    override: str


@dataclass(frozen=True)
class Wrap(Edit):
    """Call `wrapper(wrapped, instance, args, kwargs)` instead of the target, as wrapt does.

    Attributes:
        wrapper: its `module:name`.
        any_source: it leans on the target's name alone, so a changed body is no reason to refuse.
    """

    wrapper: str
    any_source: bool = False


@dataclass(frozen=True)
class Export(Edit):
    """Add a name that newer releases have; where it exists, leave it alone.

    Attributes:
        override: `module:name` of what is added.
    """

    override: str


@dataclass(frozen=True)
class AddField(Edit):
    """Give the dataclass that is the target, and every subclass of it, one more keyword field.

    Attributes:
        field: its name.
        type: its annotation.
        default: its value where none is given.
        doc: what it is for, in a line; Megatron makes a flag's help of it.
    """

    field: str
    type: object
    default: object
    doc: str


@dataclass(frozen=True)
class AddFlag(Edit):
    """Add a command-line flag to the argparse parser that the target, a function, returns.

    Attributes:
        flag: as it is written, with its dashes.
        type: what makes a value of the word; bool makes the flag a switch, list[str] one that may be repeated.
        default: the value without the flag.
        help: what `--help` says of it.
    """

    flag: str
    type: object
    default: object
    help: str


@dataclass(frozen=True)
class Probe:
    """How to see in the source that a Megatron has a change.

    Attributes:
        target: what exists then.
        contains: an expression that its body holds then; None where the name is enough.
    """

    target: str
    contains: str | None = None


@dataclass(frozen=True)
class Patch:
    """One upstream change for every release.

    Attributes:
        id: what the user calls it.
        doc: the header of the module that declares it; its first line is the summary. None under python -OO.
        upstream: the pull requests that it stands for.
        probe: how to see that a Megatron has it; None where no release does.
        edits: what it changes; all of them or none.
        repairs: where the change is native, it removes the defects that the header names. Any other leaves it alone.
        optional: it patches a package that need not be installed; until that is imported, the patch is pending.
    """

    id: str
    doc: str | None
    upstream: tuple[PullRequest, ...]
    probe: Probe | None
    edits: tuple[Edit, ...]
    repairs: bool = False
    optional: bool = False

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.doc or self.id).strip().partition("\n")[0].rstrip(".")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the edits touch, each once, in order."""
        return tuple(dict.fromkeys(edit.module for edit in self.edits))
