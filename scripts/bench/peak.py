"""How many bytes live at a time: counted from the tensors that torch makes, which may be fake."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


class PeakBytes(TorchDispatchMode):
    """Inside it, `peak` is the largest number of bytes of storages that were made inside and still live.

    Storages of `left_out` bytes do not count.
    """

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.left_out = left_out
        self.live = self.peak = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(one.untyped_storage()) for one in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda tensor: self._note(tensor, given), result)
        return result

    def _note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen or id(storage) in given or storage.nbytes() == self.left_out:
            return
        self._seen[storage] = None
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.live -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, values)
    return found
