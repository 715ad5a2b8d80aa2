"""The address of a patch's section: `docs/TOPIC.md#ID`; the topic is the folder of its declaration."""

from __future__ import annotations

from megatron_mtp_patches.cli.places import declaration_of


def topic(patch: str) -> str:
    """The folder that declares the patch of this id."""
    return declaration_of(patch).parent.name


def address(patch: str) -> str:
    """The section of the patch of this id, as the pages of docs/ link it."""
    return f"{topic(patch)}.md#{patch}"
