"""Hybrid models for reproductions."""

from __future__ import annotations

import importlib
from typing import Any


def find_hybrid_model() -> tuple[Any, Any]:
    """The class of hybrid models and the specification of its layers; before 0.18 they are called after Mamba."""
    try:
        specs = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs")
        return importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel, specs.hybrid_stack_spec
    except ModuleNotFoundError:
        specs = importlib.import_module("megatron.core.models.mamba.mamba_layer_specs")
        return importlib.import_module("megatron.core.models.mamba.mamba_model").MambaModel, specs.mamba_stack_spec
