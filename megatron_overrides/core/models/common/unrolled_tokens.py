"""Give the MTP loss the tokens of the main model under the 1F1B overlap of experts.

There an MTP layer writes the rolled tokens of its depth into the state of the model chunk, and the loss reads its
tokens from that state: labels derived from them (NVIDIA/Megatron-LM#3457) are one token too far.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_tokens(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps build_mtp_layer_callables: the last layer restores the tokens that the first layer found in the state."""
    (first, *others, last), backward = wrapped(*args, **kwargs)

    def save_tokens(node: Any, hidden_states: torch.Tensor) -> Any:
        if node.is_first_layer:
            node.chunk_state.tokens_of_main_model = node.chunk_state.input_ids
        return first(node, hidden_states)

    def restore_tokens(node: Any, hidden_states: torch.Tensor) -> Any:
        result = last(node, hidden_states)
        if node.is_last_layer:
            node.chunk_state.input_ids = node.chunk_state.tokens_of_main_model
        return result

    return [save_tokens, *others, restore_tokens], backward
