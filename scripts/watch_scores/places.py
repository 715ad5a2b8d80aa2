"""What a rank has of a parameter: as a weight, main weight, moment or gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_overrides.norms.optimizer_tree import leaves


class Piece(NamedTuple):
    """A part of a flattened tensor.

    Attributes:
        values: the part, flat; changes of it change the tensor.
        start: which element of the whole its first one is.
    """

    values: torch.Tensor
    start: int = 0

    def has(self, element: int) -> bool:
        return self.start <= element < self.start + self.values.numel()


class Places:
    """The tensors of a rank.

    Args:
        parameters: of the model, by name, as it was before it was wrapped.
        chunks: the wrapped model.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], chunks: list[Any], optimizer: Any) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._buffer = _find_fsdp_buffer(chunks[0])

    def find(self, where: str, name: str, state: str = "") -> Piece | None:
        """What this rank has of a parameter; None where that is nothing."""
        if name not in self._parameters:
            return None
        param = self._parameters[name]
        if where == "weight":
            return self._weight(param)
        owner = self._owner(param)
        if where == "gradient":
            return self._gradient(param, owner)
        if owner is None:
            return None
        value = owner if where == "main weight" else self._states(owner).get(state)
        return None if value is None else Piece(_flatten(value), self._start(param))

    def owns(self, name: str, element: int) -> bool:
        """True if the optimizer of this rank updates this element."""
        piece = self.find("main weight", name)
        return piece is not None and piece.has(element)

    def _weight(self, param: torch.nn.Parameter) -> Piece:
        buffer, number = self._item(param, "model_weight_buffer")
        if buffer is None:
            return Piece(_flatten(param.data))
        return Piece(buffer.get_item(number), buffer.locate_item_in_global_item(number)[0])

    def _gradient(self, param: torch.nn.Parameter, owner: Any) -> Piece | None:
        if self._buffer is None:
            return Piece(_flatten(param.main_grad))
        value = None if owner is None else getattr(owner, "decoupled_grad", None)
        value = getattr(owner, "grad", None) if value is None else value
        return None if value is None else Piece(_flatten(value), self._start(param))

    def _owner(self, param: torch.nn.Parameter) -> Any:
        """The tensor that the torch optimizer of this rank updates for a parameter; None where it updates none."""
        if self._buffer is not None:
            held = (one for leaf in leaves(self._optimizer) for group in leaf.param_groups for one in group["params"])
            return next((one for one in held if getattr(one, "orig_param", None) is param), None)
        main = getattr(param, "main_param", None)
        owner = param if main is None else main
        return owner if any(owner is one for leaf in leaves(self._optimizer) for one in _updated(leaf)) else None

    def _states(self, owner: Any) -> dict[str, torch.Tensor]:
        states = (leaf.optimizer.state for leaf in leaves(self._optimizer) if getattr(leaf, "optimizer", None))
        return next((dict(state[owner]) for state in states if owner in state), {})

    def _start(self, param: torch.nn.Parameter) -> int:
        """Which element of a parameter is the first one that this rank updates."""
        buffer, number = self._item(param, "main_weight_buffer")
        if buffer is not None:
            return int(buffer.locate_item_in_global_item(number)[0])
        for leaf in leaves(self._optimizer):
            if param in getattr(leaf, "model_param_gbuf_map", {}):
                return int(leaf._get_model_param_range_map(param)["param"].start)
        return 0

    def _item(self, param: torch.nn.Parameter, kind: str) -> tuple[Any, int]:
        """The buffer of Megatron-FSDP that has the parameter, and the number of its item; None and 0 without one."""
        if self._buffer is None:
            return None, 0
        group = self._buffer.parameter_groups[self._buffer.param_to_param_group[param]]
        buffer = getattr(group, kind)
        return (None, 0) if buffer is None else (buffer, buffer.param_idx[param])


def _find_fsdp_buffer(chunk: Any) -> Any:
    while chunk is not None:
        if hasattr(chunk, "param_and_grad_buffer"):
            return chunk.param_and_grad_buffer
        chunk = getattr(chunk, "module", None)
    return None


def _updated(leaf: Any) -> list[torch.Tensor]:
    return [one for group in leaf.optimizer.param_groups for one in group["params"]] if leaf.optimizer else []


def _flatten(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat: torch.Tensor = local.detach().view(-1)
    return flat
