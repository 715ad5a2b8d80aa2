"""The decision about a patch, read from the source that it would change before anything is changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from .declare import Edit, Patch, PatchError, Probe
from .fingerprints import ABSENT, KnownSources, fingerprint, target_exists
from .project import Project
from .source import ask, find_file, first_lines, has_definition
from .state import State


@dataclass(frozen=True)
class Decision:
    """The state of a patch, as it is or will be once the patch is installed, and why.

    It is pending if the package that the patch edits is not installed.
    """

    state: State
    reason: str

    @property
    def installs(self) -> bool:
        """True if the edits of the patch are made, now that what it edits is there."""
        return self.state in (State.APPLIED, State.REPAIRED)


def decide(patch: Patch, sources: KnownSources, project: Project, path: list[str] | None = None) -> Decision:
    """Decide to apply, leave alone or refuse `patch` in the library that an import would find.

    `path` reads these directories instead of the running interpreter's.
    """
    if not patch.edits:
        return Decision(State.NATIVE, "it edits nothing")
    package = patch.package or patch.modules[0].partition(".")[0]
    if not any(find_file(module, path) for module in patch.modules):
        if patch.package or all(map(project.is_optional, patch.modules)):
            return Decision(State.PENDING, f"{patch.modules[0]} is not installed")
        return Decision(State.REFUSED, f"{patch.modules[0]} is not installed, nor is anything else that it patches")
    is_native = patch.probe is not None and is_present(patch.probe, path)
    if is_native and not patch.is_native_anywhere:
        return Decision(State.REFUSED, _explain_unknown_change(patch, sources, project, path))
    here = f"this {project.display_name(package)}"
    if is_native and not patch.repairs:
        return Decision(State.NATIVE, f"{here} has it")
    problem = find_drift(patch, sources, project, path)
    if problem:
        return Decision(State.REFUSED, problem)
    if is_native:
        return Decision(State.REPAIRED, "native; its defects are repaired")
    return Decision(State.APPLIED, f"{here} lacks it")


def read_sources(patches: Iterable[Patch]) -> None:
    """Ask the sources what deciding on these patches and installing them asks, module by module.

    Each file is parsed once then: few trees are kept, all answers are.
    """
    asked: dict[str, list[Callable[[], object]]] = {}
    for patch in patches:
        for edit in patch.edits:
            questions = asked.setdefault(edit.module, [partial(ask, first_lines, edit.module)])
            questions.append(partial(target_exists, edit))
            if edit.check_source:
                questions.append(partial(fingerprint, edit))
        if patch.probe:
            asked.setdefault(patch.probe.target.partition(":")[0], []).append(partial(is_present, patch.probe))
    with _no_garbage_collection():
        for questions in asked.values():
            with suppress(PatchError):  # the file does not parse: the patches that it concerns will say so
                for question in questions:
                    question()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A tree has so many nodes that each would make Python look through all objects of torch and Megatron."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_present(probe: Probe, path: list[str] | None = None) -> bool:
    module, _, name = probe.target.partition(":")
    return bool(ask(has_definition, module, name, probe.contains or "", path=path))


def find_drift(patch: Patch, sources: KnownSources, project: Project, path: list[str] | None = None) -> str | None:
    """Say why the patch may not be applied to this source and what to do, or return None."""
    for edit in patch.edits:
        if edit.check_source:
            digest = fingerprint(edit, path)
            is_known = bool(sources.releases_with(edit.target, digest))
        else:
            digest = ABSENT
            is_known = edit.adds_name or target_exists(edit, path) or find_file(edit.module, path) is None
        if not is_known:
            return _explain_drift(patch, edit, digest, sources, project, path)
    return None


def _explain_drift(
    patch: Patch, edit: Edit, digest: str, sources: KnownSources, project: Project, path: list[str] | None
) -> str:
    if edit.check_source and edit.target not in sources.targets:
        return (
            f"{edit.target} has no known source in any release: the edit is new. Review it in each release, and run "
            f"`{project.command} drift --against FOLDER --accept RELEASE` for each"
        )
    file = find_file(edit.module, path)
    where = f"in {file}" if file else "(its module is not installed)"
    what = "is missing" if digest == ABSENT else "is not the source of any release that these patches know"
    return (
        f"{edit.target} {what} {where}. {_known_releases(patch, sources, path)} Compare that function with the nearest "
        f"release. If the patch still fits it, make it known: `{project.command} drift --against FOLDER --accept NAME "
        f"--only {edit.target}`. If not, {_ways_out(patch, project)}"
    )


def _explain_unknown_change(patch: Patch, sources: KnownSources, project: Project, path: list[str] | None) -> str:
    assert patch.probe is not None
    target = patch.probe.target
    return (
        f"{target} is in {find_file(target.partition(':')[0], path)}, but in no release that these patches know, so "
        f"what it does is not known. {_known_releases(patch, sources, path)} Compare it with what "
        f"`{project.command} explain {patch.id}` says. Then {_ways_out(patch, project)}"
    )


def _known_releases(patch: Patch, sources: KnownSources, path: list[str] | None) -> str:
    releases = ", ".join(sources.package_releases(patch.package))
    return f"Known: {releases}; nearest: {sources.nearest_release((patch,), path)}."


def _ways_out(patch: Patch, project: Project) -> str:
    return (
        f"install a known release, or leave the patch out with {project.choice_variable}=-{patch.id} (`status` names "
        f"all that are refused), or set {project.drift_variable}=warn to train without every patch that is refused."
    )
