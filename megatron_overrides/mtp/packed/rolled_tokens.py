"""The wrappers that roll tokens and masks: of packed sequences with padding, and masks that are None.

Under the 1F1B overlap of experts (--overlap-moe-expert-parallel-comm) no MTP block runs, and its scheduled layers leave
rolled tokens behind: those of the main model are restored.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.packed.packed_layout import has_padding
from megatron_overrides.mtp.packed.padded_roll import roll_left, without_empty_sequences


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


def roll_packed_sequences(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Wraps _roll_tensor_packed_seq, which returns (tensor, sum) and rolls what has no padding.

    It also refuses, as before, to roll along another dimension than the last or by another shift than -1.
    """
    tensor, packed, cp_group = call["tensor"], call["packed_seq_params"], call["cp_group"]
    if has_padding(packed) and call["shifts"] == -1 and call["dims"] in (-1, tensor.dim() - 1):
        rolled = roll_left(tensor, packed, cp_group)
        return rolled, rolled.sum() if call.get("return_sum", True) else None
    call["packed_seq_params"] = without_empty_sequences(packed, cp_group)
    return call.proceed()


def roll_padding_mask(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer._get_embeddings, which from 0.18 on rolls a padding mask (True: padding).

    A roll puts False where there is no next token, which would make a token of it. So the opposite is rolled. Without
    packing upstream's tests want the False, and the mask stays as it is.
    """
    mask = call.get("padding_mask")
    if mask is None or call.get("packed_seq_params") is None:
        return call.proceed()
    call["padding_mask"] = mask.logical_not()
    input_ids, position_ids, is_token, *rest = call.proceed()
    return (input_ids, position_ids, is_token.logical_not(), *rest)


def roll_nothing(call: Call) -> tuple[Any, Any]:
    """Wraps roll_tensor(tensor, ...), which returns (tensor, sum): for a mask or labels that are None, (None, None)."""
    return (None, None) if call["tensor"] is None else call.proceed()
