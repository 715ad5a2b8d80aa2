"""How errors name a setting."""

from __future__ import annotations


def spell(name: str) -> str:
    """Return `--mtp-clip-grad (config.mtp_clip_grad)`: frameworks with configurations have no flags."""
    return f"--{name.replace('_', '-')} (config.{name})"
