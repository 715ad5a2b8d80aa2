"""The wrapper that leaves the prompts of conversations out of the loss."""

from __future__ import annotations

import copy
from typing import Any

from megatron_overrides.call import Call


def mask_prompts_of_identity_format(call: Call) -> Any:
    """Wraps SFTTokenizer.tokenize_conversation: the identity format masks prompts, as in 0.17 and on main.

    NVIDIA/Megatron-LM#6682: 0.18 and 0.19 return before they mask, for this format as for the default one. A copy of
    the tokenizer with another name of its format goes on to the masks; the template of its turns is the same.
    """
    tokenizer = call.instance
    if tokenizer._prompt_format != "identity" or not call["return_target"]:
        return call.proceed()
    masking = copy.copy(tokenizer)
    masking._prompt_format = "identity, masked"
    return call.proceed(masking)
