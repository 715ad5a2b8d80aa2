"""The copies that other modules made by `from x import y`: they follow y when something else takes its place."""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any, NamedTuple


class _Move(NamedTuple):
    old: Any  # kept alive, so that no other object gets its id
    new: Any
    place: str
    keep: Set[str]


class Copies:
    """Collects what has taken the place of what, and then points all copies at it in one scan of the modules."""

    def __init__(self) -> None:
        self._moves: dict[int, _Move] = {}  # by the id of the old value

    def move(self, old: Any, new: Any, place: str, keep: Set[str]) -> None:
        """Record that copies of `old` become `new`, except in the modules `keep`.

        An override's module is kept: there the name is the override's own. `place` is the target, for messages.
        """
        for key, earlier in list(self._moves.items()):
            if earlier.new is old:
                self._moves[key] = earlier._replace(new=new)
        self._moves[id(old)] = _Move(old, new, place, keep)

    @property
    def places(self) -> list[str]:
        """The targets whose copies are still to follow."""
        return list(dict.fromkeys(move.place for move in self._moves.values()))

    def follow(self, module: Any) -> None:
        """Let the copies in this module follow already."""
        if self._moves:
            _follow(module.__name__, module, self._moves, _kinds(self._moves))

    def follow_all(self) -> None:
        """Let the copies in all modules follow. An error of one module is raised when the others are done."""
        moves, self._moves = self._moves, {}
        kinds = _kinds(moves)
        problems = []
        for name, module in list(sys.modules.items()) if moves else ():
            try:
                _follow(name, module, moves, kinds)
            except Exception as error:
                problems.append(error)
        if problems:
            raise problems[0]


def _kinds(moves: dict[int, _Move]) -> set[type]:
    return {type(move.old) for move in moves.values()}


def _follow(module_name: str, module: Any, moves: dict[int, _Move], kinds: set[type]) -> None:
    names = getattr(module, "__dict__", None)
    if not isinstance(names, dict):
        return
    # Two passes, as almost no module has a copy; and most names can be told by their type, which costs less than an id.
    if any([id(value) in moves for value in list(names.values()) if type(value) in kinds]):
        for name, value in list(names.items()):
            move = moves.get(id(value))
            if move is not None and module_name not in move.keep:
                names[name] = move.new
