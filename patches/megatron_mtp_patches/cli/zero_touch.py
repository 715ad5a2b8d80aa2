"""`enable` and `disable`: one file in site-packages applies the patches in every Python whose environment asks for it.

Python runs the `import` lines of each .pth file as it starts, before the script. It prints what such a line raises and
continues, which would train without the patches; so an error there is kept, and fails the import of Megatron.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from ..engine import PatchError

VARIABLE = "MEGATRON_MTP_PATCHES"
FILE = "megatron_mtp_patches_zero_touch.pth"

# It must work without the package, which may be uninstalled before it, and leave processes without Megatron alone.
_START = """
try:
    import megatron_mtp_patches
except Exception as error:
    import sys
    cause = error
    class Guard:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "megatron.core" and "megatron_mtp_patches" not in sys.modules:
                raise RuntimeError(
                    "MEGATRON_MTP_PATCHES is set, but the import of megatron_mtp_patches failed: "
                    f"{type(cause).__name__}: {cause}. Correct the variable or unset it, or install the package in "
                    f"{sys.prefix}"
                ) from cause
    sys.meta_path.insert(0, Guard)
"""
TEXT = (
    "# Written by `megatron-mtp-patches enable`; `megatron-mtp-patches disable` removes it.\n"
    f"import os; os.environ.get({VARIABLE!r}, '').strip() and "
    f"exec({_START!r}, {{'__name__': 'megatron_mtp_patches.pth'}})\n"
)


def enable() -> int:
    """Write the .pth file beside the installed package, and print what it does."""
    file = _find_own_folder() / FILE
    try:
        was_enabled = file.exists() and file.read_text(encoding="utf-8") == TEXT
        if not was_enabled:
            file.write_text(TEXT, encoding="utf-8")
    except OSError as error:
        raise PatchError(
            f"cannot write {file}: {error.strerror}. Run this as a user who may, or install the package "
            f"into your own environment (python -m venv, or pip install --user) and enable it there"
        ) from error
    print(
        f"{'Enabled already' if was_enabled else 'Enabled'} by {file}.\n"
        f"Each Python that reads it applies the patches as it starts, where {VARIABLE} is set: all, repairs, id,id "
        f"(only these) or -id,-id (all but these). Elsewhere nothing changes."
    )
    return 0


def disable() -> int:
    """Remove the .pth file from wherever this interpreter reads it."""
    files = _find_enabled()
    for file in files:
        try:
            file.unlink()
        except OSError as error:
            raise PatchError(f"cannot remove {file}: {error.strerror}. Run this as a user who may") from error
        print(f"Disabled: removed {file}.")
    if not files:
        print("Not enabled here; nothing to remove.")
    return 0


def _find_enabled() -> list[Path]:
    """The files that make this interpreter apply the patches as it starts; none where it is not enabled."""
    return [folder / FILE for folder in _site_folders() if (folder / FILE).is_file()]


def is_enabled() -> bool:
    """True if this interpreter applies the patches as it starts, where the variable is set."""
    return bool(_find_enabled())


def describe_zero_touch() -> str:
    """Say whether it is enabled here, in which folder, and whether this environment asks for it."""
    enabled = _find_enabled()
    is_asked = bool(os.environ.get(VARIABLE, "").strip())
    choice = f"{VARIABLE}={os.environ[VARIABLE]}" if is_asked else f"{VARIABLE} is not set"
    if enabled:
        return f"enabled in {enabled[0].parent}; {choice}"
    return f"not enabled; {choice} acts only where the package is imported" if is_asked else "not enabled"


def _find_own_folder() -> Path:
    """The site-packages that this package is installed in: there it can be imported when the .pth file is read.

    Raises:
        PatchError: it is in none, or a Python without our PYTHONPATH does not find it.
    """
    folders = _site_folders()
    places = (Path(str(one.locate_file(""))).resolve() for one in distributions(name="megatron-mtp-patches"))
    home = next((place for place in places if place in folders), None)
    if home is None or not _imports_without_python_path(home):
        here = Path(__file__).parents[1]
        raise PatchError(
            f"megatron_mtp_patches is not installed in {sys.prefix}; it comes from {here}, which other processes may "
            f"not find. Install it (pip install . in its clone), then enable it"
        )
    return home


def _site_folders() -> list[Path]:
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(folder).resolve() for folder in (*user, *site.getsitepackages())]


def _imports_without_python_path(folder: Path) -> bool:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", VARIABLE)}
    words = [sys.executable, "-c", "import megatron_mtp_patches"]
    done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return done.returncode == 0
