"""The tensors of a rank of which other ranks may have copies, each with what tells its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatron_overrides.model_places import Placement, Shard, place
from megatron_overrides.norms.optimizer_tree import leaves

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


def find_tensors(model_chunks: list[Any], optimizer: Any) -> Iterator[Watched]:
    """Yield the weights and buffers of a rank, and the main weights and moments of its optimizer."""
    for chunk in model_chunks:
        model = _unwrap(chunk)
        placement = place(model)
        yield from _buffers(placement)
        for shard in placement.shards:
            where = f"{shard.name} {_describe(shard.region)}"
            yield Watched(f"weight {where}", _reader(shard))
            yield from _states(shard.parameter, where, optimizer)


def _unwrap(chunk: Any) -> Any:
    """The model of a chunk, without what is around it for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _describe(region: tuple[int | slice, ...]) -> str:
    return ",".join(f"{part.start}:{part.stop}" if isinstance(part, slice) else str(part) for part in region)


def _reader(shard: Shard) -> Callable[[], torch.Tensor]:
    return lambda: shard.view(shard.parameter.data)


def _buffers(placement: Placement) -> Iterator[Watched]:
    for buffer in placement.buffers:
        if buffer.attribute not in LOCAL_BUFFERS:
            # By its name each time: casts of a model put another tensor there.
            yield Watched(
                f"buffer {buffer.name} {_describe(buffer.region)}",
                lambda buffer=buffer: getattr(buffer.module, buffer.attribute, None),
            )


def _states(param: torch.nn.Parameter, where: str, optimizer: Any) -> Iterator[Watched]:
    """The main weight of a parameter, where it has one of its own, and what its torch optimizer keeps for it."""
    main = getattr(param, "main_param", None)
    part = ""
    if main is not None:
        if getattr(param, "main_param_sharded", False):
            ranges = (_range_of(leaf, param) for leaf in leaves(optimizer))
            part = f" {next(filter(None, ranges), '')}"
        yield Watched(f"main weight {where}{part}", lambda: param.main_param)
    owner = param if main is None else main
    for leaf in leaves(optimizer):
        state = getattr(getattr(leaf, "optimizer", None), "state", None)
        if state is not None and owner in state:
            for name, value in state[owner].items():
                if isinstance(value, torch.Tensor) and value.shape == owner.shape:
                    yield Watched(f"{name} {where}{part}", lambda state=state, name=name: state[owner].get(name))


def _range_of(leaf: Any, param: torch.nn.Parameter) -> str:
    """The elements of a parameter that a distributed optimizer of this rank owns; '' if it owns none."""
    if param not in getattr(leaf, "model_param_gbuf_map", {}):
        return ""
    owned = leaf._get_model_param_range_map(param)["param"]
    return f"elements {owned.start}:{owned.end}"
