"""Megatrons whose source differs from the installed one, and the changes that make them differ."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.declare import Edit
from megatron_mtp_patches.engine.fingerprints import ABSENT, fingerprint
from megatron_mtp_patches.engine.source import find_definition, find_file

Change = Callable[[str], str]


def checked_targets() -> dict[str, list[Patch]]:
    """Each target of this Megatron whose source matters, with the patches to which it does."""
    patches: dict[str, list[Patch]] = {}
    for patch in CATALOG:
        for target in dict.fromkeys(edit.target for edit in patch.edits if edit.check_source and _is_here(edit)):
            patches.setdefault(target, []).append(patch)
    return patches


def _is_here(edit: Edit) -> bool:
    return fingerprint(edit) != ABSENT


def make_checkout(folder: Path, changes: dict[str, Change]) -> Path:
    """Fill `folder` with the installed megatron and what else it takes, with changes in the sources of these modules.

    First on the path, it shadows the installed one, as a checkout does. Everything else in it is a link.
    """
    file = find_file("megatron.core")
    assert file
    site = file.parents[2]
    for package in {"megatron", *(module.partition(".")[0] for module in changes)}:
        _link(site / package, folder / package)
    for module, change in changes.items():
        source = find_file(module)
        assert source
        copy = folder / source.relative_to(site)
        for parent in reversed(copy.relative_to(folder).parents[:-1]):
            _open_up(folder / parent)
        copy.unlink()
        copy.write_text(change(source.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def _link(source: Path, link: Path) -> None:
    link.symlink_to(source, target_is_directory=source.is_dir())


def _open_up(link: Path) -> None:
    """Turn a link to a folder into a folder of links."""
    if link.is_symlink():
        source = link.resolve()
        link.unlink()
        link.mkdir()
        for entry in source.iterdir():
            if entry.name != "__pycache__":
                _link(entry, link / entry.name)


def change_nothing(source: str) -> str:
    return source


def change_line(name: str) -> Change:
    """One more statement in the function of this name (one more decorator on a class)."""

    def change(source: str) -> str:
        node = find_definition(ast.parse(source), name)
        lines = source.splitlines()
        if isinstance(node, ast.ClassDef):
            position, text = node.lineno - 1, " " * node.col_offset + "@(lambda cls: cls)"
        else:
            assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            position, text = node.body[0].lineno - 1, " " * node.body[0].col_offset + "assert True"
        return "\n".join([*lines[:position], text, *lines[position:]]) + "\n"

    return change


def declare_in_class(name: str, attribute: str) -> Change:
    """One more attribute in the class of this name, which is a field if that is a dataclass."""

    def change(source: str) -> str:
        node = find_definition(ast.parse(source), name)
        assert isinstance(node, ast.ClassDef)
        lines = source.splitlines()
        last = node.body[-1]
        assert last.end_lineno
        lines.insert(last.end_lineno, " " * last.col_offset + f"{attribute}: bool = False")
        return "\n".join(lines) + "\n"

    return change


def change_comments(names: Iterable[str]) -> Change:
    """Another comment, docstring and layout in each of these functions and classes, which does not count."""

    def change(source: str) -> str:
        lines, tree = source.splitlines(), ast.parse(source)
        bodies = []
        for name in names:
            node = find_definition(tree, name)
            assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            bodies.append((node.body[0].lineno, " " * node.body[0].col_offset))
        # from the last one on: the lines before it keep their numbers
        for line, indent in sorted(bodies, reverse=True):
            lines[line - 1 : line - 1] = ["", f"{indent}# another comment", f'{indent}"""Another docstring."""']
        return "\n".join(lines) + "\n"

    return change
