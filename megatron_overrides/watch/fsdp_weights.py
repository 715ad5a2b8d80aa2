"""The weights of a rank under Megatron-FSDP, which keeps them and what its optimizer updates in buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_overrides.model_places import Placement, place
from megatron_overrides.watch.weights import Trained, Weight, flatten_local, number_layers, rename_layer


def find_fsdp_buffer(chunk: Any) -> Any:
    """The ParamAndGradBuffer of a wrapped chunk; None without Megatron-FSDP."""
    while not hasattr(chunk, "param_and_grad_buffer"):
        if not hasattr(chunk, "module"):
            return None
        chunk = chunk.module
    return chunk.param_and_grad_buffer


def find_sharded_weights(model: torch.nn.Module, buffer: Any, trained: dict[int, Trained], prefix: str) -> list[Weight]:
    """The weights of a chunk, of which this rank may keep a part (see weights.find_weights)."""
    weights = []
    layers = number_layers(model)
    for group in buffer.parameter_groups:
        kept = getattr(group, "hfsdp_helper_wbuf", None) or group.model_weight_buffer
        for number, param in enumerate(group.params):
            ours = trained.get(id(param))
            if ours is not None:
                ours = ours._replace(elements=_find_elements(group, number, ours.values().numel(), param))
            elements, read = slice(0, param.numel()), partial(getattr, param, "data")
            if kept is not None:
                elements, read = slice(*kept.locate_item_in_global_item(number)), partial(kept.get_item, number)
            name = f"{prefix}{rename_layer(buffer.param_to_name[param].removeprefix('module.'), layers)}"
            weights.append(Weight(name, param, ours, elements, read, partial(_read_gradient, ours)))
    return weights


def place_sharded(model: torch.nn.Module) -> Placement:
    """The first place of each parameter of a model, which is as it was before Megatron-FSDP took its place.

    A place depends on the shape of a parameter alone, so a stand-in without memory is in its place meanwhile: the data
    of a sharded parameter is freed between two steps, and a DTensor has the shape of the whole weight.
    """
    with _stand_ins(model) as originals:
        placement = place(model)
    first = {id(shard.parameter): shard for shard in reversed(placement.shards)}
    shards = [shard._replace(parameter=originals[number]) for number, shard in first.items()]
    return placement._replace(shards=shards)


@contextmanager
def _stand_ins(model: torch.nn.Module) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Put a parameter of one element, expanded to the shape, in the place of each one: {its id: the original}."""
    owners = [(module, name, param) for module in model.modules() for name, param in module._parameters.items()]
    stand_ins: dict[int, torch.nn.Parameter] = {}
    originals: dict[int, torch.nn.Parameter] = {}
    for _, _, param in owners:
        if param is not None and id(param) not in stand_ins:
            original = getattr(param, "orig_param", param)
            element = torch.empty(1, dtype=original.dtype, device=original.device)
            stand_in = torch.nn.Parameter(element.expand(original.shape), requires_grad=False)
            vars(stand_in).update(vars(original))
            stand_ins[id(param)], originals[id(stand_in)] = stand_in, original
    for module, name, param in owners:
        module._parameters[name] = None if param is None else stand_ins[id(param)]
    try:
        yield originals
    finally:
        for module, name, param in owners:
            module._parameters[name] = param


def _find_elements(group: Any, number: int, size: int, param: torch.nn.Parameter) -> slice | None:
    """The elements of a parameter that the optimizer of this rank updates, which are `size`; None for all."""
    if size == param.numel():
        return None
    start = group.model_weight_buffer._get_item_slice_in_shard(number)[0]  # of a whole buffer its virtual shard
    return slice(start, start + size)


def _read_gradient(trained: Trained | None) -> torch.Tensor | None:
    if trained is None:
        return None
    gradient = getattr(trained.owned, "decoupled_grad", None)
    gradient = trained.owned.grad if gradient is None else gradient
    return None if gradient is None else flatten_local(gradient)
