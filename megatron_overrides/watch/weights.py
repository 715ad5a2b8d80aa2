"""The weights of a rank: those that it computes with, and what its optimizer has of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron_overrides.norms.optimizer_tree import leaves


class Trained(NamedTuple):
    """What the optimizer of a rank updates of a parameter.

    Attributes:
        owned: what the torch optimizer updates: the parameter, its main weight, or the part of either that a
            distributed optimizer gives to this rank.
        elements: the elements of the flattened parameter that `owned` has; None for all.
        group: the group of the torch optimizer's parameters, with the learning rate.
        optimizer: the torch optimizer.
    """

    owned: torch.Tensor
    elements: slice | None
    group: dict[str, Any]
    optimizer: Any

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of the parameter's shape that `owned` has, flattened."""
        flat = whole.detach().reshape(-1)
        return flat if self.elements is None else flat[self.elements]

    def moments(self) -> dict[str, torch.Tensor]:
        """What the torch optimizer keeps for each element."""
        state = self.optimizer.state.get(self.owned, {})
        return {name: one for name, one in state.items() if torch.is_tensor(one) and one.shape == self.owned.shape}


class Weight(NamedTuple):
    """A parameter of a rank's model.

    Attributes:
        name: in the model, without its wrappers; after the number of the chunk, if there are several.
        param: the parameter.
        trained: what the optimizer of this rank updates of it; None for nothing.
    """

    name: str
    param: torch.nn.Parameter
    trained: Trained | None

    def gradient(self) -> torch.Tensor | None:
        """The gradient, before the optimizer reads it; with a distributed optimizer only the rank's part is a sum."""
        gradient = getattr(self.param, "main_grad", None)
        return self.param.grad if gradient is None else gradient


def unwrap(chunk: Any) -> Any:
    """The model of a chunk, without what is around it for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def find_weights(models: list[torch.nn.Module], optimizer: Any) -> list[list[Weight]]:
    """The weights of each chunk of a model whose optimizer may be a chain."""
    trained = dict(_find_trained(optimizer))
    prefixes = [f"chunk {number} " * (len(models) > 1) for number in range(len(models))]
    return [
        [Weight(f"{prefix}{name}", param, trained.get(id(param))) for name, param in model.named_parameters()]
        for prefix, model in zip(prefixes, models, strict=True)
    ]


def _find_trained(optimizer: Any) -> Iterator[tuple[int, Trained]]:
    """Yield the id of each parameter that the leaves of an optimizer update, and what they update of it."""
    for leaf in leaves(optimizer):
        if leaf.optimizer is None:  # nothing trains on this rank
            continue
        groups = {id(one): group for group in leaf.optimizer.param_groups for one in group["params"]}
        for param, owned in _find_pairs(leaf):
            if id(owned) in groups:
                elements = None
                if param in getattr(leaf, "model_param_gbuf_map", {}):
                    range_of_shard = leaf._get_model_param_range_map(param)["param"]
                    elements = slice(range_of_shard.start, range_of_shard.end)
                yield id(param), Trained(owned, elements, groups[id(owned)], leaf.optimizer)


def _find_pairs(leaf: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield (a parameter of the model, what the torch optimizer may update for it)."""
    kinds = (
        ("float16_groups", "fp32_from_float16_groups"),
        ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_float16_groups", "shard_float16_groups"),  # where the kernel keeps the rest of the main weight
        ("model_fp32_groups", "shard_fp32_groups"),
    )
    has_groups = False
    for models, owned in kinds:
        for params, shards in zip(getattr(leaf, models, ()), getattr(leaf, owned, ()), strict=False):
            has_groups = True
            yield from zip(params, shards, strict=False)
    if not has_groups:
        yield from ((param, param) for group in leaf.optimizer.param_groups for param in group["params"])
