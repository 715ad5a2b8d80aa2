"""Draws configurations: features that fit each other, and the flags that they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from .features import Feature, Slot

SIZES = "--num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16".split()
PAIRS = 0.25  # of the configurations are cut by pairs of axes as well, on 4 ranks
WHOLE = 0.4  # of them have loss masks of ones


class Configuration(NamedTuple):
    """A run, and how it is studied.

    Attributes:
        name: the seed, or the feature.
        features: their names.
        words: the flags.
        data, dtype: of `parity`.
        ranks: the most of a cut.
    """

    name: str
    features: tuple[str, ...]
    words: tuple[str, ...]
    data: str
    dtype: str
    ranks: int


class Drawing:
    """Draws from slots.

    Args:
        slots: in their order.
        unknown: the names of features that are never drawn.
    """

    def __init__(self, slots: list[Slot], unknown: set[str]) -> None:
        drawn = ([one for one in slot.features if one.name not in unknown] for slot in slots)
        self.slots = [slot._replace(features=tuple(some)) for slot, some in zip(slots, drawn, strict=True)]
        self.features = {one.name: one for slot in self.slots for one in slot.features}

    def draw(self, seed: int) -> Configuration:
        """The configuration of a seed."""
        chance = random.Random(seed)
        chosen: dict[str, Feature] = {}
        for slot in self.slots:
            fitting = [one for one in slot.features if _fits(one, chosen)]
            if chance.random() < slot.probability and fitting:
                (feature,) = chance.choices(fitting, [one.weight for one in fitting])
                chosen[feature.name] = feature
        data = "whole" if chance.random() < WHOLE else "uneven"
        return _configure(str(seed), chosen, data, with_pairs=chance.random() < PAIRS)

    def single_features(self) -> Iterator[Configuration]:
        """Yield each feature alone, with what it needs, on a plain run that has each axis of the layout that it can."""
        for feature in self.features.values():
            wanted = {one.name: one for one in self._with_needs(feature)}
            chosen: dict[str, Feature] = {}
            for slot in self.slots:
                fitting = [one for one in slot.features if one.name in wanted]
                if slot.probability == 1.0 or slot.is_axis:
                    fitting += [one for one in slot.features if _fits(one, chosen | wanted)]
                chosen |= {one.name: one for one in fitting[:1]}
            yield _configure(feature.name, chosen, "uneven", with_pairs=False)

    def _with_needs(self, feature: Feature) -> list[Feature]:
        """The feature, and the first ones of those that it needs."""
        needed = (next(one for one in self.features.values() if one.name in names) for names in feature.needs)
        return [one for need in needed for one in self._with_needs(need)] + [feature]


def _fits(feature: Feature, chosen: dict[str, Feature]) -> bool:
    tolerated = not any(feature.name in one.without for one in chosen.values())
    return tolerated and not feature.without & chosen.keys() and all(names & chosen.keys() for names in feature.needs)


def _configure(name: str, chosen: dict[str, Feature], data: str, with_pairs: bool) -> Configuration:
    words = [*SIZES, *(word for one in chosen.values() for word in one.flags)]
    ranks = 4 if with_pairs or "two-instances" in chosen else 2
    return Configuration(name, tuple(chosen), tuple(words), data, "bf16" if "bf16" in chosen else "fp32", ranks)
