"""The runs of frameworks, made small and trained by their own loops.

A framework has objects with settings in place of flags. fields.py reads their layout as flags of Megatron's trainer, so
that a run has the same cuts, and sets what the flags of a cut say; the other files train it.
"""

from __future__ import annotations

from ...doctor.configuration import Configuration
from ...doctor.places import MEGATRON_BRIDGE, VERL_PPO, VERL_SFT
from ..training import FrameworkRun
from .megatron_bridge import BridgeRun
from .ms_swift import SwiftRun
from .verl import VerlRun


def make_run(configuration: Configuration) -> FrameworkRun:
    """The run of a framework's configuration."""
    if configuration.places is MEGATRON_BRIDGE:
        return BridgeRun(configuration.content)
    if configuration.places in (VERL_PPO, VERL_SFT):
        return VerlRun(configuration.content)
    return SwiftRun(configuration.content)
