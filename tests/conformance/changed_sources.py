"""Megatrons whose source differs from the installed one, and the changes that make them differ."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.fingerprints import ABSENT, fingerprint
from megatron_mtp_patches.engine.source import find_definition, find_file

Change = Callable[[str], str]
_parse = functools.lru_cache(maxsize=1)(ast.parse)


def checked_targets() -> dict[str, list[Patch]]:
    """Each target of this Megatron whose source matters, with the patches to which it does."""
    patches: dict[str, list[Patch]] = {}
    for patch in CATALOG:
        checked = [edit for edit in patch.edits if edit.check_source and fingerprint(edit) != ABSENT]
        for target in dict.fromkeys(edit.target for edit in checked):
            patches.setdefault(target, []).append(patch)
    return patches


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


def change_line(name: str) -> Change:
    """One more statement in the function of this name (one more decorator on a class)."""

    def change(source: str) -> str:
        node = _definition(source, name)
        if isinstance(node, ast.ClassDef):
            return _insert(source, {node.lineno: [" " * node.col_offset + "@(lambda cls: cls)"]})
        return _insert(source, {node.body[0].lineno: [" " * node.body[0].col_offset + "assert True"]})

    return change


def declare_in_class(name: str, attribute: str) -> Change:
    """One more attribute in the class of this name, which is a field if that is a dataclass."""

    def change(source: str) -> str:
        last = _definition(source, name).body[-1]
        return _insert(source, {last.end_lineno + 1: [" " * last.col_offset + f"{attribute}: bool = False"]})

    return change


def change_comments(names: Iterable[str]) -> Change:
    """Another comment, docstring and layout in each of these functions and classes, which does not count."""

    def change(source: str) -> str:
        firsts = [_definition(source, name).body[0] for name in names]
        indents = {first.lineno: " " * first.col_offset for first in firsts}
        comments = ["", "# another comment", '"""Another docstring."""']
        return _insert(source, {line: [indent + text for text in comments] for line, indent in indents.items()})

    return change


def _definition(source: str, name: str) -> Any:
    """The syntax tree of the function or class of this name."""
    return find_definition(_parse(source), name)


def _insert(source: str, texts: dict[int, list[str]]) -> str:
    """`source` with these lines before the lines of these numbers."""
    lines = source.splitlines()
    for number in sorted(texts, reverse=True):  # from the last one on: the lines before it keep their numbers
        lines[number - 1 : number - 1] = texts[number]
    return "\n".join(lines) + "\n"
