"""The tensors of a rank of which other ranks may have copies, each with what tells its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from megatron_overrides.model_places import Placement, Shard, place
from megatron_overrides.watch.weights import Weight

# Buffers of routers that count the tokens of a rank, or of a microbatch.
LOCAL_BUFFERS = {
    *("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "qb_beta_accum", "qb_beta_count"),
}


class Watched(NamedTuple):
    """A tensor.

    Attributes:
        name: what it is, and its place in the checkpoint of the whole model. Tensors with the same name are copies.
        read: returns it, or None where there is none now.
    """

    name: str
    read: Callable[[], torch.Tensor | None]


def find_tensors(model: torch.nn.Module, weights: Iterable[Weight]) -> Iterator[Watched]:
    """Yield the weights and buffers of a model, and the main weights and moments of its optimizer."""
    placement = place(model)
    yield from _find_buffers(placement)
    of_params = {id(weight.param): weight for weight in weights}
    for shard in placement.shards:
        where = f"{shard.name} {_describe(shard.region)}"
        yield Watched(f"weight {where}", _reader(shard))
        yield from _find_states(of_params[id(shard.parameter)], where)


def _describe(region: tuple[int | slice, ...]) -> str:
    return ",".join(f"{part.start}:{part.stop}" if isinstance(part, slice) else str(part) for part in region)


def _reader(shard: Shard) -> Callable[[], torch.Tensor]:
    return lambda: shard.view(shard.parameter.data)


def _find_buffers(placement: Placement) -> Iterator[Watched]:
    for buffer in placement.buffers:
        if buffer.attribute not in LOCAL_BUFFERS:
            # By its name each time: casts of a model put another tensor there.
            yield Watched(
                f"buffer {buffer.name} {_describe(buffer.region)}",
                lambda buffer=buffer: getattr(buffer.module, buffer.attribute, None),
            )


def _find_states(weight: Weight, where: str) -> Iterator[Watched]:
    """The main weight of a parameter, where it has one beside it, and the moments."""
    if weight.owned is None:
        return
    if weight.elements is not None:
        where += f" elements {weight.elements.start}:{weight.elements.stop}"
    if weight.owned.dtype != weight.param.dtype:
        yield Watched(f"main weight {where}", lambda: weight.owned)
    for name in weight.moments():
        yield Watched(f"{name} {where}", lambda name=name: weight.moments().get(name))
