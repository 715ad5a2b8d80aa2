"""The tokens that the MTP loss is to see under the 1F1B overlap of experts: those of the trunk.

There an MTP layer writes the rolled tokens of its depth into the state of the model chunk, from which the last node
takes its tokens: labels derived from them (NVIDIA/Megatron-LM#3457) are one token too far.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_tokens(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps build_mtp_layer_callables: what the first layer found, the last one leaves behind."""
    (first, *others, last), backward = wrapped(*args, **kwargs)

    def enter(node: Any, hidden_states: torch.Tensor) -> Any:
        if node.is_first_layer:
            node.chunk_state.tokens_of_trunk = node.chunk_state.input_ids
        return first(node, hidden_states)

    def leave(node: Any, hidden_states: torch.Tensor) -> Any:
        result = last(node, hidden_states)
        if node.is_last_layer:
            node.chunk_state.input_ids = node.chunk_state.tokens_of_trunk
        return result

    return [enter, *others, leave], backward
