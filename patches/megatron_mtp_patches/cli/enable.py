"""`enable`: every Python of this environment applies the patches if a variable is set."""

from __future__ import annotations

from ..engine import PatchError
from .zero_touch import FILE, TEXT, VARIABLE, find_own_folder


def enable() -> int:
    """Write the .pth file beside the installed package, and print what it does."""
    file = find_own_folder() / FILE
    try:
        done = file.exists() and file.read_text(encoding="utf-8") == TEXT
        if not done:
            file.write_text(TEXT, encoding="utf-8")
    except OSError as error:
        raise PatchError(
            f"cannot write {file}: {error.strerror}. Run this as a user who may, or install the package "
            f"into your own environment (python -m venv, or pip install --user) and enable it there"
        ) from error
    print(
        f"{'Enabled already' if done else 'Enabled'} by {file}.\n"
        f"Each Python that reads it applies the patches as it starts, where {VARIABLE} is set (all, id,id or -id,-id); "
        f"elsewhere nothing changes."
    )
    return 0
