"""What is changed: the set without one edit, an override with one comparison turned round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CATALOG = "patches/megatron_mtp_patches/catalog.py"

# The code that measures, clips and skips.
_OPTIMIZER = "megatron_overrides/core/optimizer"
COMPARED = (
    *(f"{_OPTIMIZER}/{name}.py" for name in ("norms", "optimizer", "skipped_updates", "orthogonalized")),
    *(f"{_OPTIMIZER}/{name}.py" for name in ("grad_norm_groups", "zero_counts", "qk_clip", "optimizer_config")),
    "megatron_overrides/core/models/mimo/optimizer.py",
    "megatron_overrides/core/transformer/multi_token_prediction/skipped_steps.py",
)
# Its opposite; for an order, the same with or without the boundary too.
TURNED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


@dataclass(frozen=True)
class Mutant:
    """`name` says what is changed, the same in every run; `where` is for people; `words` occur in tests about it."""

    name: str
    where: str
    file: str
    source: str  # what `file` becomes, if no edit is dropped
    modules: tuple[str, ...]  # the modules whose tests come first
    words: tuple[str, ...]
    dropped: tuple[tuple[str, int], ...] = ()  # (patch, position) of the edit, if one is dropped

    def as_change(self, root: Path = ROOT) -> dict[str, Any]:
        """What change.py makes of a warm process."""
        module = "" if self.dropped else self.modules[0]
        return {"dropped": self.dropped, "module": module, "file": str(root / self.file), "source": self.source}


def without_edits() -> list[Mutant]:
    """One for each distinct edit; patches that share it all lose it."""
    from megatron_mtp_patches.catalog import BASE
    from megatron_mtp_patches.catalog import CATALOG as PATCHES

    places: dict = {}
    for patch in (*BASE, *PATCHES):
        for position, edit in enumerate(patch.edits):
            places.setdefault(edit, []).append((patch.id, position))
    mutants = []
    for edit, dropped in places.items():
        override = getattr(edit, "override", None) or getattr(edit, "wrapper", None)
        added = override or getattr(edit, "field", None) or edit.flag
        last = edit.name.split(".")[-1]
        words = [added.rpartition(":")[2].split(".")[-1], *edit.name.split(".")[-2:], last.removeprefix("_")]
        mutants.append(
            Mutant(
                name=f"{type(edit).__name__} {edit.target} {added}",
                where=", ".join(dict.fromkeys(patch for patch, _ in dropped)),
                file=CATALOG,
                source="",
                modules=((override.partition(":")[0],) if override else ()) + (edit.module,),
                words=tuple(dict.fromkeys(word for word in words if len(word) > 5 and not word.startswith("__"))),
                dropped=tuple(dropped),
            )
        )
    return mutants


def turned_comparisons(files: tuple[str, ...] = COMPARED, root: Path = ROOT) -> list[Mutant]:
    """One for each comparison and each way to turn it."""
    mutants: list[Mutant] = []
    for file in files:
        source = (root / file).read_text(encoding="utf-8")
        seen: dict[str, int] = {}
        for number, (function, comparison, position, _) in enumerate(_sites(ast.parse(source))):
            for turned in TURNED[type(comparison.ops[position])]:
                tree = ast.parse(source)
                _, changed, _, line = list(_sites(tree))[number]
                before = ast.unparse(changed)
                changed.ops[position] = turned()
                name = f"{file} {function}: {before} -> {ast.unparse(changed)}"
                seen[name] = seen.get(name, 0) + 1
                mutants.append(
                    Mutant(
                        name=name if seen[name] == 1 else f"{name} #{seen[name]}",
                        where=f"{file}:{line}",
                        file=file,
                        source=ast.unparse(tree) + "\n",
                        modules=(file.removesuffix(".py").replace("/", "."),),
                        words=(function.split(".")[-1],),
                    )
                )
    return mutants


def _sites(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Compare, int, int]]:
    """(function, comparison, which of its operators, line), in the order of the source."""
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inside = f"{function}.{child.name}".lstrip(".")
        if isinstance(child, ast.Compare):
            yield from ((function, child, position, child.lineno) for position in range(len(child.ops)))
        yield from _sites(child, inside)
