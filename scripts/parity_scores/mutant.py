"""A copy of a checkout in which one file is mutated."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

OF_SITE_PACKAGES = "transformer_engine"


def make_mutant(row: dict[str, Any], checkout: Path, site: Path, root: Path) -> Path:
    """Fill the empty folder `root` with the mutant of a row of mutants.toml, and return its mutated file.

    All other modules are links. The scripts are copies: Python takes the folder of a script for that to which a link
    leads, and would import the modules there.

    Args:
        site: the folder of packages with TransformerEngine.
    """
    changed = row["file"].partition("/")[0]
    for package in dict.fromkeys(("megatron", changed)):
        source = site if package == OF_SITE_PACKAGES else checkout
        shutil.copytree(source.resolve() / package, root / package, copy_function=os.symlink)
    for script in checkout.glob("*.py"):
        shutil.copy(script, root)
    file = root / row["file"]
    text = mutate(file.read_text(encoding="utf-8"), row["old"], row["new"], row.get("occurrence"))
    file.unlink()  # the link, through which the checkout would be written
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    return file


def mutate(text: str, old: str, new: str, occurrence: int | None) -> str:
    """The text with `new` in the place of this occurrence of `old`, from 1; None: of the only one.

    Raises:
        ValueError: there is no such occurrence, or there are several.
    """
    parts = text.split(old)
    if len(parts) != 2 if occurrence is None else len(parts) <= occurrence:
        raise ValueError(f"{len(parts) - 1} times in the file, not {occurrence or 'once'}: {old!r}")
    place = occurrence or 1
    return new.join([old.join(parts[:place]), old.join(parts[place:])])


def check_import(file: Path, root: Path) -> None:
    """End this process if another file than this one of `root` is imported as its module."""
    module = ".".join(file.relative_to(root).with_suffix("").parts)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin != str(file):
        sys.exit(f"{module} is {spec and spec.origin}, not {file}")
