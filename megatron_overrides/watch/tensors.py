"""The tensors of a rank of which other ranks may have copies, each with what tells its copies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from megatron_overrides.model_places import Placement, Shard, is_quantized
from megatron_overrides.watch.weights import Trained, Weight

# Buffers of routers that count the tokens of a rank, or of a microbatch.
LOCAL_BUFFERS = {
    *("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "qb_beta_accum", "qb_beta_count"),
}


class Watched(NamedTuple):
    """A tensor.

    Attributes:
        name: what it is, and its place in the checkpoint of the whole model. Tensors with the same name are copies.
        read: returns it, or None where there is none now.
        weight: of a gradient, the weight of the checkpoint, and its layer; ranks may have other parts of it.
    """

    name: str
    read: Callable[[], torch.Tensor | None]
    weight: str = ""


GRADIENT = "gradient "  # begins the name of one


def find_tensors(placement: Placement, weights: Iterable[Weight]) -> Iterator[Watched]:
    """Yield the weights and buffers of a model, its gradients, and the main weights and moments of its optimizer."""
    yield from _find_buffers(placement)
    weights_by_param = {id(weight.param): weight for weight in weights}
    for shard in placement.shards:
        where = f"{shard.name} {_describe(shard.region)}"
        weight = weights_by_param.pop(id(shard.parameter), None)  # a parameter may have several shards
        if is_quantized(shard.parameter):
            pass  # its class says what its bits are
        elif weight is None or weight.elements is None:
            yield Watched(f"weight {where}", partial(_read_weight, shard))
        else:
            yield Watched(f"weight {_add_elements(where, weight.elements)}", weight.read)
        if weight is not None and weight.trained is not None:
            yield from _find_states(weight, weight.trained, where, _name_weight(shard))


def _describe(region: tuple[int | slice, ...]) -> str:
    return ",".join(f"{part.start}:{part.stop}" if isinstance(part, slice) else str(part) for part in region)


def _read_weight(shard: Shard) -> torch.Tensor:
    return shard.view(shard.parameter.data)


def _find_buffers(placement: Placement) -> Iterator[Watched]:
    for buffer in placement.buffers:
        if buffer.attribute not in LOCAL_BUFFERS:
            # By its name each time: casts of a model put another tensor there.
            read = partial(getattr, buffer.module, buffer.attribute, None)
            yield Watched(f"buffer {buffer.name} {_describe(buffer.region)}", read)


def _find_states(weight: Weight, trained: Trained, where: str, whole: str) -> Iterator[Watched]:
    """The gradient of a parameter, the main weight, where it has one beside it, and the moments."""
    where = _add_elements(where, trained.elements)
    yield Watched(f"{GRADIENT}{where}", weight.read_gradient, whole)
    if weight.has_main_weight():
        yield Watched(f"main weight {where}", trained.values)
    for name in trained.moments():
        yield Watched(f"{name} {where}", partial(_read_moment, trained, name))


def _name_weight(shard: Shard) -> str:
    """The name of a weight with its layer, which is in the name, or the first index if layers are one tensor."""
    is_stacked = ".layers." in shard.name and not re.search(r"\.layers\.\d", shard.name)
    return f"{shard.name} {shard.region[0]}" if is_stacked and isinstance(shard.region[0], int) else shard.name


def _add_elements(where: str, elements: slice | None) -> str:
    return where if elements is None else f"{where} elements {elements.start}:{elements.stop}"


def _read_moment(trained: Trained, name: str) -> torch.Tensor | None:
    return trained.moments().get(name)
