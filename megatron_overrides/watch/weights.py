"""The weights of a rank: those that it computes with, and what its optimizer has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_overrides.model_places import is_quantized
from megatron_overrides.norms.optimizer_tree import leaves

HEADS = "mtp."  # begins the names of weights of MTP heads


class Trained(NamedTuple):
    """What the optimizer of a rank updates of a parameter.

    Attributes:
        owned: what the torch optimizer updates: the parameter, its main weight, or the part of either that a
            distributed optimizer or Megatron-FSDP gives to this rank; Megatron-FSDP's are DTensors.
        elements: the elements of the flattened parameter that `owned` has; None for all.
        group: the group of the torch optimizer's parameters, with the learning rate.
        optimizer: the torch optimizer.
    """

    owned: torch.Tensor
    elements: slice | None
    group: dict[str, Any]
    optimizer: Any

    def values(self) -> torch.Tensor:
        """The values of `owned` that are on this rank, flattened."""
        return flatten_local(self.owned)

    def moments(self) -> dict[str, torch.Tensor]:
        """What the torch optimizer keeps for each element."""
        state = self.optimizer.state.get(self.owned, {})
        return {
            name: flatten_local(one)
            for name, one in state.items()
            if torch.is_tensor(one) and one.shape == self.owned.shape
        }


class Weight(NamedTuple):
    """A parameter of a rank's model.

    Attributes:
        name: in the model, without its wrappers; after the number of the chunk, if there are several.
        param: the parameter, as it was before Megatron-FSDP took its place.
        trained: what the optimizer of this rank updates of it; None for nothing.
        elements: under Megatron-FSDP those of the flattened parameter that this rank keeps between two updates.
        read: returns them.
        read_gradient: returns the gradient that the optimizer of this rank will take for `trained`, or None.
    """

    name: str
    param: torch.nn.Parameter
    trained: Trained | None
    elements: slice | None
    read: Callable[[], torch.Tensor]
    read_gradient: Callable[[], torch.Tensor | None]

    def trained_values(self) -> torch.Tensor:
        """What the model computes with, of the elements that the optimizer of this rank updates, flattened."""
        flat = self.read().detach().reshape(-1)
        if self.trained is None or self.trained.elements is None:
            return flat
        first = 0 if self.elements is None else self.elements.start
        return flat[self.trained.elements.start - first : self.trained.elements.stop - first]

    def has_main_weight(self) -> bool:
        """True if the optimizer updates other memory than that with which the model computes."""
        if self.trained is None or is_quantized(self.param):
            return self.trained is not None
        return self.trained.values().data_ptr() != self.trained_values().data_ptr()


def flatten_local(tensor: Any) -> torch.Tensor:
    """The values of a tensor, or of this rank's part of a DTensor, as one row."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat: torch.Tensor = local.detach().reshape(-1)
    return flat


def find_weights(model: torch.nn.Module, trained: dict[int, Trained], prefix: str) -> list[Weight]:
    """The weights of a chunk, which are whole on this rank.

    Args:
        model: without its wrappers.
        trained: what find_trained returns.
        prefix: begins the names.
    """
    weights = []
    layers = number_layers(model)
    for local_name, param in model.named_parameters():
        ours, name = trained.get(id(param)), rename_layer(local_name, layers)
        read, read_gradient = partial(getattr, param, "data"), partial(_read_gradient, param, ours)
        weights.append(Weight(f"{prefix}{name}", param, ours, None, read, read_gradient))
    return weights


def number_layers(model: torch.nn.Module) -> dict[str, str]:
    """What the names of layers begin with: {in this model: in the whole model, of which other stages have layers}."""
    return {
        f"{name}.": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and isinstance(getattr(module, "layer_number", None), int)
    }


def rename_layer(name: str, layers: dict[str, str]) -> str:
    """The name of a weight, with the number that its layer has in the whole model."""
    return next((whole + name[len(local) :] for local, whole in layers.items() if name.startswith(local)), name)


def _read_gradient(param: torch.nn.Parameter, trained: Trained | None) -> torch.Tensor | None:
    """The gradient, before the optimizer reads it; with a distributed optimizer only the rank's part is a sum."""
    gradient = getattr(param, "main_grad", None)
    gradient = param.grad if gradient is None else gradient
    if gradient is None or trained is None:
        return None
    flat: torch.Tensor = gradient.detach().reshape(-1)
    return flat if trained.elements is None else flat[trained.elements]


def find_trained(optimizer: Any) -> dict[int, Trained]:
    """What the leaves of an optimizer, which may be a chain, update of each parameter, by the parameter's id.

    The optimizer of Megatron-FSDP has DTensors, each of which refers to the parameter whose place it has taken.
    """
    trained = {}
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
                original = getattr(param, "orig_param", param)
                trained[id(original)] = Trained(owned, elements, groups[id(owned)], leaf.optimizer)
    return trained


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
