"""The wrapper that checks the weights of MTP heads once, before the first training step runs on them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list


def check_heads_once(call: Call) -> Any:
    """Wraps the functions that get_forward_backward_func returns (model, forward_only, pg_collection, ... by keyword).

    Here all ranks of a model begin a step, checkpoints are loaded, and nothing has been computed with the heads. A
    check of the optimizer would come after Megatron's check of the gradients, which names no parameter.
    """
    # Imported here because that module imports the schedules.
    from megatron_overrides.mtp.heads.finite_heads import check_heads

    chunks = as_list(call["model"])
    is_first = not getattr(chunks[0], "_mtp_heads_are_checked", False)
    # A CUDA graph cannot be captured around a read on the host.
    if is_first and not call.get("forward_only") and not torch.cuda.is_current_stream_capturing():
        if getattr(get_model_config(chunks[0]), "mtp_num_layers", None):
            check_heads(chunks, call.get("pg_collection"))
        chunks[0]._mtp_heads_are_checked = True
    return call.proceed()
