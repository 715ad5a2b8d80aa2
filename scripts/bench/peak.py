"""The bytes that live at a time, counted from the tensors that torch makes, which may be fake."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class PeakBytes(TorchDispatchMode):
    """Inside it, `peak` is the largest number of bytes of storages that were made inside and still live.

    Storages of `left_out` bytes do not count.
    """

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.left_out = left_out
        self.live = self.peak = 0
        self._counted = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._counted and id(storage) not in arguments and storage.nbytes() != self.left_out:
                self._counted[storage] = None
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def _storages(values: Any) -> list[Any]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
