"""Where a patch is described: `docs/TOPIC.md#ID`; the topic is the folder of its declaration."""

from __future__ import annotations

from pathlib import Path

import megatron_mtp_patches

PACKAGE = Path(megatron_mtp_patches.__file__).parent


def topic(patch: str) -> str:
    """The folder that declares the patch of this id."""
    (file,) = PACKAGE.glob(f"*/{patch.replace('-', '_')}.py")
    return file.parent.name


def address(patch: str) -> str:
    """The section of the patch of this id, as the pages of docs/ link it."""
    return f"{topic(patch)}.md#{patch}"
