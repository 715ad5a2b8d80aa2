"""The nodes of an MTP layer under the 1F1B overlap of experts (--overlap-moe-expert-parallel-comm).

They never call the MTP block, so what the patches do there is done here once more.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.heads.detached_heads import TAKES_MAIN_HIDDEN_STATES


def restore_main_model_tokens(call: Call) -> Any:
    """Wraps build_mtp_layer_callables: the last layer restores the tokens that the first layer found in the state.

    An MTP layer writes the rolled tokens of its depth into the state of the model chunk, and the loss reads its tokens
    from that state: labels derived from them (NVIDIA/Megatron-LM#3457) are one token too far.
    """
    (first, *others, last), backward = call.proceed()

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


def detach_scheduled_layer(call: Call) -> Any:
    """Wraps build_mtp_layer_callables(layer); upstream does not detach here, so its MTP loss trains the main model."""
    (first, *others), backward = call.proceed()
    layer = call["layer"]

    def forward(node: Any, hidden_states: torch.Tensor) -> Any:
        if layer.config.mtp_detach_heads and node.is_first_layer:
            setattr(layer, TAKES_MAIN_HIDDEN_STATES, True)
        return first(node, hidden_states)

    return [forward, *others], backward
