"""Record in a run which patches it was made with."""

from __future__ import annotations

from typing import Any

from .. import record
from ..engine.call import Call
from ..engine.state import State


def summarize(record: str) -> str:
    """The line of a log for `record`: how many patches are in each state, and which differ by the user's choice.

    Refused patches are named. Without a profile, so are those that are left out or, where these are the most, the
    others.
    """
    version, *words, sources = record.split()
    profile = f" {words[0]}" if words[0].startswith("profile=") else ""
    ids: dict[State, list[str]] = {state: [] for state in State}
    states = states_in(record)
    for id, state in states.items():
        ids[state].append(id)
    leaves_out_most = 2 * len(ids[State.DISABLED]) > len(states)
    counts = []
    for state, names in ids.items():
        is_named = state is State.REFUSED or ((state is State.DISABLED) != leaves_out_most and not profile)
        if names:
            counts.append(f"{len(names)} {state}" + (f" ({', '.join(names)})" if is_named else ""))
    return f"{version}{profile}: {', '.join(counts)}; {sources}"


def states_in(record: str) -> dict[str, State]:
    """{id of a patch: its state} of a record."""
    words = (word.partition("=") for word in record.split()[1:-1])
    return {id: State(state) for id, _, state in words if id != "profile"}


def record_in_arguments(call: Call) -> Any:
    """Wraps validate_args: what is in Megatron's args reaches its log, TensorBoard, W&B and the checkpoint."""
    call["args"].megatron_mtp_patches = record()
    return call.proceed()


def record_in_bridge_configuration(call: Call) -> Any:
    """Wraps ConfigContainer.validate of Megatron-Bridge: it saves its configuration with each checkpoint."""
    call.instance.logger.megatron_mtp_patches = record()
    return call.proceed()
