"""The words in which a patch is declared. Data only: nothing here touches what is patched.

A target is written `package.module:Qualified.name`; so is the override that takes its place. docs/engine.md shows a
whole declaration, and runs it. The kinds of edit:

    Override       the target is the override, where there is one, where there is none, or everywhere
    Wrap           calls of the target go through a wrapper
    AddField       a dataclass has one more keyword field
    AddArgument    the same, where transformers makes a command line of it
    AddFlag        a command line has one more flag
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class PatchError(RuntimeError):
    """Patches cannot be applied or reverted as asked; the message says what to change."""

    exit_code = 1


class UsageError(PatchError):
    """A command line that cannot be carried out; the message says what to change."""

    exit_code = 2


@dataclass(frozen=True)
class PullRequest:
    """An upstream change.

    Attributes:
        number: of the pull request.
        native_since: the first release that has it; "main" where only upstream's main has; None where nothing has.
        repository: its owner and name on GitHub; '' for that of the library which the project patches.
        twin_of: the number of another one that brings the same change, for another branch.
        part: what of it the patch brings and what not, where that is not all, in a sentence.
        ended: "closed", "merged after DATE", or "merged into branch NAME", where no known Megatron has it; '' while it
            is open.
        also_in: releases before `native_since` that have what it brings, because a later change took it away.
    """

    number: int
    native_since: str | None = None
    repository: str = ""
    twin_of: int | None = None
    part: str = ""
    ended: str = ""
    also_in: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.repository.partition('/')[2]}#{self.number}"

    @property
    def is_merged(self) -> bool:
        """True if the main of its repository has it."""
        return self.native_since is not None or self.ended.startswith("merged after")

    @property
    def is_awaited(self) -> bool:
        """True if no known release and no known main has it, and it is not given up."""
        return self.native_since is None and self.ended != "closed" and self.twin_of is None

    @property
    def fate(self) -> str:
        """The state of the pull request upstream, in words."""
        if self.twin_of:
            return f"the same as #{self.twin_of}"
        if self.native_since == "main":
            return "on main"
        return f"since {self.native_since}" if self.native_since else self.ended or "open"


@dataclass(frozen=True)
class Edit:
    """One change to one target.

    Attributes:
        target: what is changed, as `package.module:Qualified.name`.
    """

    target: str

    @property
    def check_source(self) -> bool:
        """True if a patch is refused where the target has an unknown source."""
        return True

    @property
    def adds_name(self) -> bool:
        """True if the target may be missing, and is added then."""
        return False

    @property
    def module(self) -> str:
        """The module that is changed."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """The qualified name inside the module."""
        return self.target.partition(":")[2]

    @property
    def needed_name(self) -> str:
        """The name that must exist: the target or, where it may be missing, its class; '' for the module."""
        return self.name.rpartition(".")[0] if self.adds_name else self.name

    @property
    def implementation(self) -> str:
        """`module:name` of the function that does the work; '' for an edit that needs none."""
        return ""

    @property
    def implementation_module(self) -> str:
        """The module that the implementation is in; '' where none is needed."""
        return self.implementation.partition(":")[0]


@dataclass(frozen=True)
class Override(Edit):
    """Make the target what `override` is.

    Attributes:
        override: the `module:name` of something that serves every known release.
        where: "present": where the release has the target, with a known source; one that lacks it is left as it is.
            "missing": where the release lacks the target; one that exists stays as it is, whatever its source.
            "everywhere": in both cases.
    """

    override: str
    where: Literal["present", "missing", "everywhere"] = "present"

    @property
    def check_source(self) -> bool:
        return self.replaces

    @property
    def adds_name(self) -> bool:
        return self.where != "present"

    @property
    def replaces(self) -> bool:
        """True if a target that exists gives way to the override."""
        return self.where != "missing"

    @property
    def implementation(self) -> str:
        """The override."""
        return self.override


@dataclass(frozen=True)
class Wrap(Edit):
    """Call `wrapper(call)` instead of the target; `call` is an engine.call.Call.

    Attributes:
        wrapper: its `module:name`.
        check_source: False where it depends on nothing but the target's name and passes on all that it does not know,
            so that a changed body is no reason to refuse.
    """

    wrapper: str
    check_source: bool = True

    @property
    def implementation(self) -> str:
        """The wrapper."""
        return self.wrapper


@dataclass(frozen=True)
class AddField(Edit):
    """Give the dataclass that is the target, and every subclass of it, one more keyword field.

    Attributes:
        field: its name.
        type: its annotation.
        default: its value where none is given.
        doc: what it does, in a line; the help of its flag.
        is_upstream: newer releases have the field.
        named_in: the number of an upstream change that has a field of this name and is in no known release; 0 for none.
        check_source: as in Wrap.
        setting: what the field's metadata has under "setting", also where the field is native. If it has
            `field_metadata`, a new field gets that as well.
    """

    field: str
    type: object
    default: object
    doc: str
    is_upstream: bool = False
    named_in: int = 0
    check_source: bool = True
    setting: object = None

    @property
    def metadata(self) -> dict[str, object]:
        """The field's own: the mark of a field that is added, and what its setting hands in."""
        marks = {"added_in_place": True, **getattr(self.setting, "field_metadata", {})}
        return marks if self.setting is None else {**marks, "setting": self.setting}


@dataclass(frozen=True)
class AddArgument(AddField):
    """The same for a dataclass of which transformers makes a command line."""

    metadata = property(lambda self: {"help": self.doc}, doc="What argparse is given.")


@dataclass(frozen=True)
class AddFlag(Edit):
    """Add a command-line flag to the argparse parser that the target, a function, returns.

    Attributes:
        flag: as it is written, with its dashes.
        type: what makes a value of the word; bool makes the flag a switch, list[str] one that may be repeated.
        default: the value without the flag.
        help: what `--help` says of it.
        metavar: what stands for the word in `--help`; None for argparse's choice.
    """

    flag: str
    type: object
    default: object
    help: str
    metavar: str | None = None
    check_source = False


@dataclass(frozen=True)
class Probe:
    """A sign in the source that a release has a change.

    Attributes:
        target: what exists then.
        contains: an expression that its body holds then; None where the name is enough.
    """

    target: str
    contains: str | None = None


@dataclass(frozen=True)
class Patch:
    """One upstream change for every release, and all that is said of it.

    `explain`, README and the pages are made of the texts: sentences in Markdown, a tuple for a list.

    Attributes:
        id: what the user calls it.
        summary: what it does, in a line without a full stop.
        edits: what it changes; all of them or none.
        upstream: the pull requests that it brings; the first decides since when the change is native.
        probe: how to see that a release has the change; None where none has it. A release that has it, although by
            `upstream` none does, has an unknown implementation: the patch is refused.
        problem: what goes wrong without it.
        adds: what a user, or other code, can see of it.
        repairs: the defects of upstream's own version, which it removes where the change is native. Without any, the
            patch leaves such a release alone.
        undetected: why `doctor` does not find the runs that go wrong without it, where it does not.
        refuses: the settings with which training does not start.
        numerics: which numbers change, and when.
        unasked: what a patch that is no repair changes in a run that sets none of its settings; '' for nothing.
        turned_off_by: the setting that turns this off; '' where nothing does but leaving the patch out.
        notes: what else to know, on memory or checkpoints.
        is_repair: whether it is an unconditional bug fix, for which no setting asks: the profile `repairs` has it.
            Where it is refused, the run goes on without it, with a warning, unless the policy is skip.
        package: the distribution that it patches, where that is not the library; its known releases are called
            "PACKAGE VERSION". It need not be installed: until it is imported, the patch is pending.
    """

    id: str
    summary: str
    edits: tuple[Edit, ...]
    upstream: tuple[PullRequest, ...] = ()
    probe: Probe | None = None
    problem: str = ""
    adds: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    undetected: str = ""
    refuses: tuple[str, ...] = ()
    numerics: str = ""
    unasked: str = ""
    turned_off_by: str = ""
    notes: tuple[str, ...] = ()
    is_repair: bool = False
    package: str = ""

    @property
    def is_native_anywhere(self) -> bool:
        """True if a known release has the change."""
        return bool(self.upstream) and self.upstream[0].native_since is not None

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the edits touch, each once, in order."""
        return tuple(dict.fromkeys(edit.module for edit in self.edits))
