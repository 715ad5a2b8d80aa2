"""Print the folders of the package and which of them import which. Ends with 1 beyond the limits that stand below.

    python -m scripts.structure

A folder is all that is in it; a module beside the folders stands for itself. An import counts where it is written, in a
function as well. Not counted: modules that are named by strings, as those of the catalog and of a Wrap.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from scripts.common.process import ROOT

PACKAGE = ROOT / "patches" / "megatron_mtp_patches"
MOST_FOLDERS, LONGEST_CHAIN = 23, 7

Imports = dict[str, dict[str, list[str]]]  # {folder or module: {what it imports: where}}


def read_imports(package: Path) -> Imports:
    """Return which folders and loose modules of `package` import which others."""
    imports: Imports = defaultdict(lambda: defaultdict(list))
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package.parent).with_suffix("").parts
        for statement, is_later in _import_statements(ast.parse(file.read_bytes())):
            places = {_place(one, package) for one in _imported(statement, name[:-1])}
            for there in places - {_place(name, package), ""}:
                where = f"{file.relative_to(package)}:{statement.lineno}{' in a function' * is_later}"
                imports[_place(name, package)][there].append(where)
    return imports


def _import_statements(node: ast.AST, is_later: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, is_later
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from _import_statements(child, is_later or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _imported(statement: ast.Import | ast.ImportFrom, above: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(statement, ast.Import):
        return [tuple(alias.name.split(".")) for alias in statement.names]
    start = above[: len(above) - statement.level + 1] if statement.level else ()
    return [(*start, *filter(None, (statement.module or "").split(".")), alias.name) for alias in statement.names]


def _place(name: tuple[str, ...], package: Path) -> str:
    """The folder or module of `package` that a name is in; '' for a name of another package."""
    is_own = len(name) > 1 and ((package / name[1]).is_dir() or (package / f"{name[1]}.py").is_file())
    return "" if name[0] != package.name else name[1] if is_own else "__init__"


def main(package: Path = PACKAGE) -> int:
    folders, left = sorted(file.parent.name for file in package.glob("*/__init__.py")), read_imports(package)
    chains: dict[str, list[str]] = {}  # the longest chain of folders that begins at each
    for place in {there for imported in left.values() for there in imported} - left.keys():
        chains[place] = [place] * (place in folders)
    while ready := [place for place in left if left[place].keys() <= chains.keys()]:
        for place in ready:
            chains[place] = [place] * (place in folders) + max((chains[there] for there in left.pop(place)), key=len)
    while above := left.keys() - {there for imported in left.values() for there in imported}:
        left = {place: imported for place, imported in left.items() if place not in above}
    longest = max(chains.values(), key=len, default=[])
    print(f"{len(folders)} folders, at most {MOST_FOLDERS}: {' '.join(folders)}")
    print(f"the longest chain has {len(longest)}, at most {LONGEST_CHAIN}: {' > '.join(longest)}")
    in_circles = [(a, b, where) for a in left for b, where in left[a].items() if b in left]
    for here, there, where in in_circles:
        print(f"in a circle, {here} > {there}: {', '.join(where)}")
    return int(len(folders) > MOST_FOLDERS or len(longest) > LONGEST_CHAIN or bool(in_circles))


if __name__ == "__main__":
    sys.exit(main())
