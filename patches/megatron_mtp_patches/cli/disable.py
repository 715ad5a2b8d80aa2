"""`disable`: the opposite of `enable`."""

from __future__ import annotations

from ..engine import PatchError
from .zero_touch import find_enabled


def disable() -> int:
    """Remove the .pth file from wherever this interpreter reads it."""
    files = find_enabled()
    for file in files:
        try:
            file.unlink()
        except OSError as error:
            raise PatchError(f"cannot remove {file}: {error.strerror}. Run this as a user who may") from error
        print(f"Disabled: removed {file}.")
    if not files:
        print("Not enabled here; nothing to remove.")
    return 0
