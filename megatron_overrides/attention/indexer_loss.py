"""The weight of the indexer's loss of sparse attention."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call


def scale_indexer_loss(call: Call) -> Any:
    """Wraps forward_step_calc_loss: the indexer's loss of sparse attention gets the weight of other auxiliary losses.

    NVIDIA/Megatron-LM#4070, #5244: the scale of the loss and, without --calculate-per-token-loss, the context-parallel
    size over the number of microbatches.
    """
    config = call["config"]
    outputs = call.proceed()
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core import parallel_state
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        scale = torch.ones(1, device=torch.cuda.current_device())
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not config.calculate_per_token_loss:
            size = call["cp_group_size"]  # None from the schedule that overlaps the communication of experts
            size = parallel_state.get_context_parallel_world_size() if size is None else size
            scale = scale * size / call["num_microbatches"]
        DSAIndexerLossAutoScaler.set_loss_scale(scale)
    return outputs
