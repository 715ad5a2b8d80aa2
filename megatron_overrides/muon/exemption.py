"""Optimizers that orthogonalize their update, so that clipping their gradient by its norm does nothing for them.

NVIDIA/Megatron-LM#5395: Newton-Schulz makes an update of the same size from a gradient of any size. But if another
module's large norm clips the gradient below the floor of the iteration (#5394), the update becomes almost zero.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_overrides.norms.optimizer_tree import is_exempt

# These multiply the orthogonal matrix by the nuclear norm of the gradient: its size comes back in.
_SCALED_BY_NORM = ("PolarGrad", "MOP")


def _get(self: Any) -> bool:
    if "_skip_grad_norm_clip" in vars(self):
        return self._skip_grad_norm_clip
    if getattr(self.config, "clip_orthogonalizing_optimizers", True):  # no such field: the patch is left out
        return False
    return _orthogonalizes(getattr(self, "optimizer", None))


def _set(self: Any, value: bool) -> None:
    self._skip_grad_norm_clip = bool(value)


skip_grad_norm_clip = property(
    _get,
    _set,
    doc="""True if this optimizer is exempt from clipping and from the skip threshold; set it to decide otherwise.

    By default those of the Muon family (OrthogonalizedOptimizer of emerging_optimizers) are, unless
    `config.clip_orthogonalizing_optimizers`. SOAP, Lion, PolarGrad and MOP take the size of a gradient into account.
    """,
)


def _is_chain_exempt(self: Any) -> bool:
    return bool(self.chained_optimizers) and all(is_exempt(child) for child in self.chained_optimizers)


def _refuse_chain_exemption(self: Any, value: bool) -> None:
    raise AttributeError("skip_grad_norm_clip of a chain follows from what is in it: set it on its chained_optimizers")


skip_grad_norm_clip_of_chain = property(
    _is_chain_exempt, _refuse_chain_exemption, doc="Whether all that is chained here is exempt."
)


def _orthogonalizes(optimizer: Any) -> bool:
    """True if the torch optimizer, however wrapped, is one of the Muon family.

    Megatron's own name for the base class is `object` where emerging_optimizers is missing, so the package is asked;
    one of its optimizers can exist only if the package was imported.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    family = sys.modules.get("emerging_optimizers.orthogonalized_optimizers")
    if family is None:
        return False
    scaled = tuple(getattr(family, name) for name in _SCALED_BY_NORM if hasattr(family, name))
    return isinstance(optimizer, family.OrthogonalizedOptimizer) and not isinstance(optimizer, scaled)
