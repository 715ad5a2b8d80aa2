"""The weights of a rank: those that it computes with, and what its optimizer has of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron_overrides.norms.optimizer_tree import leaves


class Weight(NamedTuple):
    """A parameter of a rank's model, with what trains it, if this rank's optimizer does.

    Attributes:
        name: in the model, without its wrappers.
        param: the parameter.
        owned: what the torch optimizer updates: the parameter, its main weight, or the part of either that a
            distributed optimizer gives to this rank; None if it updates none of it.
        elements: the elements of the flattened parameter that `owned` has; None for all.
        group: the group of the torch optimizer's parameters, with the learning rate.
        optimizer: the torch optimizer.
    """

    name: str
    param: torch.nn.Parameter
    owned: torch.Tensor | None = None
    elements: slice | None = None
    group: dict[str, Any] | None = None
    optimizer: Any = None

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of the parameter's shape that `owned` has, flattened."""
        flat = whole.detach().reshape(-1)
        return flat if self.elements is None else flat[self.elements]

    def gradient(self) -> torch.Tensor | None:
        """The gradient of the elements that `owned` has, before the optimizer reads it; None without one."""
        gradient = getattr(self.param, "main_grad", None)
        gradient = self.param.grad if gradient is None else gradient
        return None if gradient is None else self.part(gradient)

    def moments(self) -> dict[str, torch.Tensor]:
        """What the torch optimizer keeps for each element."""
        state = self.optimizer.state.get(self.owned, {}) if self.owned is not None else {}
        return {name: one for name, one in state.items() if torch.is_tensor(one) and one.shape == self.owned.shape}


def unwrap(chunk: Any) -> Any:
    """The model of a chunk, without what is around it for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def find_weights(model: torch.nn.Module, optimizer: Any) -> Iterator[Weight]:
    """Yield the weights of a model whose optimizer may be a chain."""
    trained = dict(_find_trained(optimizer))
    for name, param in model.named_parameters():
        yield Weight(name, param, *trained.get(id(param), ()))


def _find_trained(optimizer: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (id of a parameter, the fields of its weight from `owned` on) of what the leaves of an optimizer update."""
    for leaf in leaves(optimizer):
        torch_optimizer = getattr(leaf, "optimizer", None)
        groups = {id(one): group for group in getattr(torch_optimizer, "param_groups", ()) for one in group["params"]}
        for param, owned in _find_pairs(leaf, groups):
            elements = None
            if owned is not None and id(owned) in groups:
                if param in getattr(leaf, "model_param_gbuf_map", {}):
                    range_of_shard = leaf._get_model_param_range_map(param)["param"]
                    elements = slice(range_of_shard.start, range_of_shard.end)
                yield id(param), (owned, elements, groups[id(owned)], torch_optimizer)


def _find_pairs(leaf: Any, groups: dict[int, Any]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield (a parameter of the model, what the torch optimizer updates for it)."""
    kinds = (
        ("float16_groups", "fp32_from_float16_groups"),
        ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_float16_groups", "shard_float16_groups"),  # where the kernel keeps the rest of the main weight
        ("model_fp32_groups", "shard_fp32_groups"),
    )
    is_paired = False
    for models, owned in kinds:
        for params, shards in zip(getattr(leaf, models, ()), getattr(leaf, owned, ()), strict=False):
            is_paired = True
            yield from zip(params, shards, strict=False)
    if not is_paired:
        for group in getattr(leaf.optimizer, "param_groups", ()) if groups else ():
            yield from ((param, param) for param in group["params"])
