"""Weights that depend on their names and global coordinates alone: no cut of the model changes them."""

from __future__ import annotations

import zlib

import torch

from megatron_overrides.model_places import Shard


def fill(shards: list[Shard], centered_norms: bool, draw: int, step: float = 0.0) -> None:
    """Give each shard its part of the weight of its name.

    Args:
        centered_norms: the weights of norms are added to 1 (--apply-layernorm-1p).
        draw: which of the random weights of these names.
        step: each entry is multiplied by a random number from 1 - step to 1 + step; other steps have other numbers.
    """
    with torch.no_grad():
        for shard in shards:
            whole = make_weight(shard.name, shard.shape, centered_norms, draw)
            if step:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{shard.name} {step}".encode()))
                whole = whole * (1 + step * (2 * torch.rand(whole.shape, generator=generator) - 1))
            part = shard.view(shard.parameter.data)
            part.copy_(whole[shard.region].reshape(part.shape))


def make_weight(name: str, shape: tuple[int, ...], centered_norms: bool, draw: int = 0) -> torch.Tensor:
    """The whole weight of this name, in float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    values = torch.randn(shape, generator=generator)
    if "A_log" in name:  # of a Mamba or GatedDeltaNet layer: its exponential is a decay
        return 0.3 * values.abs()
    if name.endswith(("bias", ".D")):
        return 0.1 * values
    if "norm" in name:
        return 0.1 * values if centered_norms else 1 + 0.2 * values
    return (0.5 if "router" in name else 0.15) * values
