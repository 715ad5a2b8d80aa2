"""Refuse MTP heads that a Hugging Face checkpoint lacks and that Megatron-Bridge has not initialized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model

from megatron_overrides.call import Call
from megatron_overrides.mtp.heads.finite_heads import listed, parameters_of_heads
from megatron_overrides.norms.model_ranks import is_on_any_rank


def refuse_uninitialized_heads(call: Call) -> Any:
    """Wraps load_weights_hf_to_megatron(hf_pretrained, megatron_model, ...) of a MegatronModelBridge.

    It may be memory of any values, so it is not enough to look at them. A Megatron checkpoint that is loaded later may
    have the heads; a run that resumes from one costs `perform_initialization=True` nothing but time.

    Raises:
        ValueError: on all ranks of the model, if there is such a head.
    """
    result = call.proceed()
    source, model = call["hf_pretrained"], call["megatron_model"]
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    config = get_model_config(chunks[0])
    if config.perform_initialization or not getattr(config, "mtp_num_layers", None):
        return result
    empty = _uninitialized_heads(call.instance, source, chunks)
    if is_on_any_rank(bool(empty), getattr(chunks[0], "pg_collection", None)):
        raise ValueError(
            f"The checkpoint {getattr(source, 'model_name_or_path', source)} lacks weights of the MTP heads, and "
            f"nothing has initialized them: {listed(empty) if empty else 'another rank names them'}. Set "
            f"model.perform_initialization=True to train new heads (Megatron-Bridge sets it to False for a model that "
            f"it loads), or write num_nextn_predict_layers 0 into config.json to have no heads"
        )
    return result


def _uninitialized_heads(bridge: Any, source: Any, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of the parameters of heads that nothing has written to, and for which `source` has no weight."""
    untouched = [(name, param) for name, param in parameters_of_heads(chunks) if param._version == 0]
    if not untouched:
        return []
    filled = {id(task.param_weight) for task in bridge.build_conversion_tasks(source, chunks) if task is not None}
    return [name for name, param in untouched if id(param) not in filled]
