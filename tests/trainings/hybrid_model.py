"""The class of hybrid models, which releases call by other names."""

from __future__ import annotations

import importlib
from typing import Any


def find_hybrid_model() -> tuple[Any, Any]:
    """(HybridModel, the spec of its layers); up to 0.17 MambaModel and its own."""
    try:
        model = importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
        return model, importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    except ModuleNotFoundError:
        model = importlib.import_module("megatron.core.models.mamba.mamba_model").MambaModel
        return model, importlib.import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec
