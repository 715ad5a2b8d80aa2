"""A chunk of the model of a rank, under data parallelism of any kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_overrides.model_places import Placement, place
from megatron_overrides.watch.fsdp_weights import find_fsdp_buffer, find_sharded_weights, place_sharded
from megatron_overrides.watch.weights import Trained, Weight, find_weights


class Chunk(NamedTuple):
    """A chunk.

    Attributes:
        model: without its wrappers.
        wrapped: with them, as a trainer calls it.
        fsdp_buffer: the ParamAndGradBuffer of Megatron-FSDP; None without it.
        prefix: begins the names of weights.
    """

    model: torch.nn.Module
    wrapped: torch.nn.Module
    fsdp_buffer: Any
    prefix: str

    def find_weights(self, trained: dict[int, Trained]) -> list[Weight]:
        if self.fsdp_buffer is None:
            return find_weights(self.model, trained, self.prefix)
        return find_sharded_weights(self.model, self.fsdp_buffer, trained, self.prefix)

    def place(self) -> Placement:
        return place(self.model) if self.fsdp_buffer is None else place_sharded(self.model)


def find_chunks(model_chunks: list[Any]) -> list[Chunk]:
    """The chunks of a model, from what is around them for data parallelism and half precision."""
    has_several = len(model_chunks) > 1
    return [
        Chunk(_unwrap(chunk), chunk, find_fsdp_buffer(chunk), f"chunk {number} " * has_several)
        for number, chunk in enumerate(model_chunks)
    ]


def _unwrap(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
