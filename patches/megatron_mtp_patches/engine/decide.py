"""What is to become of a patch in this Megatron, read from its source before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .declare import Edit, Export, Patch, Probe
from .facts import ask
from .fingerprints import ABSENT, Table, fingerprint, has_place
from .questions import ask_probe, is_checked
from .source import find_file


class Verdict(str, Enum):
    ADD = "add"
    REPAIR = "repair"
    NATIVE = "native"
    DISABLED = "disabled"
    REFUSED = "refused"


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    reason: str

    @property
    def installs(self) -> bool:
        return self.verdict in (Verdict.ADD, Verdict.REPAIR)


def decide(patch: Patch, table: Table) -> Decision:
    """Whether to add, repair, leave alone or refuse `patch` in the Megatron that an import would find."""
    package = patch.modules[0].partition(".")[0]
    if not any(find_file(module) for module in patch.modules):
        if patch.optional:
            return Decision(Verdict.ADD, f"{package} is not installed")
        return Decision(Verdict.REFUSED, f"{patch.modules[0]} is not installed, nor is anything else that it patches")
    native = patch.probe is not None and is_present(patch.probe)
    here = "this Megatron" if package == "megatron" else f"this {package}"
    if native and not patch.repairs:
        return Decision(Verdict.NATIVE, f"{here} has it")
    problem = find_drift(patch, table)
    if problem:
        return Decision(Verdict.REFUSED, problem)
    if native:
        return Decision(Verdict.REPAIR, "native; its defects are repaired")
    return Decision(Verdict.ADD, f"{here} lacks it")


def is_present(probe: Probe) -> bool:
    return bool(ask(probe.target.partition(":")[0], ask_probe(probe)))


def find_drift(patch: Patch, table: Table) -> str | None:
    """Why the patch may not be applied to this source, or None. The sentence says what to do."""
    for edit in patch.edits:
        if is_checked(edit):
            print_ = fingerprint(edit)
            known = bool(table.releases_with(edit.target, print_))
        else:
            print_ = ABSENT
            known = isinstance(edit, Export) or has_place(edit) or find_file(edit.module) is None
        if not known:
            return _explain_drift(patch, edit, print_, table)
    return None


def _explain_drift(patch: Patch, edit: Edit, print_: str, table: Table) -> str:
    file = find_file(edit.module)
    where = f"in {file}" if file else "(its module is not installed)"
    what = "is missing" if print_ == ABSENT else "is not the source of any release that these patches know"
    return (
        f"{edit.target} {what} {where}. Known: {', '.join(table.releases)}; nearest: "
        f"{table.nearest_release((patch,))}. Compare that function with the nearest release. Then either install a "
        f"known release, or leave the patch out with MEGATRON_MTP_PATCHES=-{patch.id}, or set "
        f"MEGATRON_MTP_PATCHES_ON_DRIFT=warn to train without every patch that is refused."
    )
