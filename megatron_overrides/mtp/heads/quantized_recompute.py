"""Full activation recomputation of an MTP layer in fp8 or fp4, and with packed sequences.

NVIDIA/Megatron-LM#6760 (the layer's own tensor-parallel group) and #4593 (up to 0.17: TransformerEngine's checkpoint
gave no gradient to tensors passed by keyword, and Megatron's cannot save packed sequences).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.call import Call


def checkpoint_layer(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionLayer._checkpointed_forward: takes keywords, and up to 0.17 the function to run."""
    config = call.instance.config
    if config.recompute_method != "uniform" or config.recompute_num_layers != 1:
        return call.proceed()
    function = call.args[0] if call.args else call.instance._proj_and_transformer_layer
    names = [name for name, value in call.kwargs.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in call.kwargs.items() if name not in names}

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return function(**others, **dict(zip(names, tensors, strict=True)))

    tensors = [call.kwargs[name] for name in names]
    if config.fp8 or config.fp4:
        return _checkpoint_quantized(call.instance, run, tensors)
    if call.args and any(value is not None for value in others.values()):
        return tensor_parallel.checkpoint(run, config.distribute_saved_activations, *tensors)
    return call.proceed()


def _checkpoint_quantized(layer: Any, run: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
    from megatron.core.extensions.transformer_engine import te_checkpoint

    config = layer.config
    group = getattr(layer, "tp_group", None)  # a layer of 0.16 knows none
    if group is None:
        group = parallel_state.get_tensor_model_parallel_group()
    # With delayed scaling TransformerEngine keeps the scales of the first forward only if it is in fp8 already.
    is_delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
    with mtp.get_fp8_context(config) if is_delayed else nullcontext():
        return te_checkpoint(
            run, config.distribute_saved_activations, tensor_parallel.random.get_cuda_rng_tracker, group, *tensors
        )
