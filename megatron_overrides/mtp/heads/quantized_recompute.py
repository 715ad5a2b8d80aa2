"""Full activation recomputation of an MTP layer in fp8 or fp4, by TransformerEngine's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer import multi_token_prediction as mtp


def checkpoint_quantized(layer: Any, run: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
    """Run `run` of `tensors` in a checkpoint; NVIDIA/Megatron-LM#6760: over the layer's own tensor-parallel group."""
    from megatron.core.extensions.transformer_engine import te_checkpoint

    config = layer.config
    group = getattr(layer, "tp_group", None)  # a layer of 0.16 has none
    if group is None:
        group = parallel_state.get_tensor_model_parallel_group()
    # With delayed scaling TransformerEngine keeps the scales of the first forward only if it is in fp8 already.
    is_delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
    with mtp.get_fp8_context(config) if is_delayed else nullcontext():
        return te_checkpoint(
            run, config.distribute_saved_activations, tensor_parallel.random.get_cuda_rng_tracker, group, *tensors
        )
