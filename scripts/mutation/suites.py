"""Which tests run against a mutant, those likeliest to see it first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .mutants import ROOT, Mutant

# How many ranks each stage has.
RANKS = {"near": 1, "2 ranks": 2, "1 rank": 1, "conformance": 1, "end to end": 1}
CONFORMANCE = "tests/conformance/test_conformance.py"
# Of conformance, only what does not go through the list of declared edits, or look in it for a certain one.
BEHAVIOUR = [f"{CONFORMANCE}::test_the_record_is_in_megatron_s_arguments"]


@dataclass(frozen=True)
class Stage:
    """A run of tests, named as files or one by one; see RANKS."""

    name: str
    ranks: int
    tests: tuple[str, ...]

    def by_file(self) -> dict[str, list[str]]:
        """{file: the tests that are named one by one}, in order; none where the whole file is named."""
        files: dict[str, list[str]] = {}
        for test in self.tests:
            file, separator, _ = test.partition("::")
            files.setdefault(file, []).extend([test] if separator else [])
        return files


def stages(mutant: Mutant | None, root: Path = ROOT) -> list[Stage]:
    one = _sorted(mutant, root, "tests/megatron_overrides")
    two = _sorted(mutant, root, "tests/multirank")
    near = tuple(file for file, score in one if score)
    far = tuple(file for file, score in one if not score)
    tests = {
        "near": near,
        "1 rank": far,
        "2 ranks": tuple(file for file, _ in two),
        "conformance": tuple(BEHAVIOUR),
        "end to end": tuple(file for file, _ in _sorted(mutant, root, "tests/end_to_end")),
    }
    found = [Stage(name, ranks, tests[name]) for name, ranks in RANKS.items()]
    if mutant and any(module.startswith("megatron.training") for module in mutant.modules):
        found.sort(key=lambda stage: stage.name in ("1 rank", "2 ranks"))  # the trainer is in neither
    return [stage for stage in found if stage.tests]


def _sorted(mutant: Mutant | None, root: Path, folder: str) -> list[tuple[str, int]]:
    """(test file, how much it has to do with the mutant), most first."""
    files = [str(path.relative_to(root)) for path in sorted((root / folder).rglob("test_*.py"))]
    scored = [(file, _score(mutant, file, root) if mutant else 0) for file in files]
    return sorted(scored, key=lambda pair: -pair[1])


def _score(mutant: Mutant, file: str, root: Path) -> int:
    text = (root / file).read_text(encoding="utf-8")
    first, *others = (_mirror(module) == file for module in mutant.modules)
    return 4 * first + 3 * sum(word in text for word in mutant.words) + sum(others)


def _mirror(module: str) -> str:
    """The test file of an override, or of the Megatron module that it overrides."""
    *folders, name = module.replace("megatron.", "megatron_overrides.", 1).split(".")
    return f"tests/{'/'.join(folders)}/test_{name}.py"
