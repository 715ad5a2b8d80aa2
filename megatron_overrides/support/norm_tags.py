"""Tag parameters with their norm groups: the MTP heads, then what --grad-norm-group names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from megatron_overrides.support.norm_groups import MTP_GRAD_NORM_GROUP, named_groups, tag, tag_of

_TIED_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")


def tag_mtp_block(block: torch.nn.Module) -> None:
    """Tag all parameters of an MTP block whose gradients are to be clipped separately; nothing else is in a block."""
    config: Any = block.config
    if getattr(config, "mtp_detach_heads", False) or config.separate_mtp_grad_clip:
        for param in block.parameters():
            tag(param, MTP_GRAD_NORM_GROUP)


def tag_mtp_blocks(chunks: Iterable[torch.nn.Module]) -> None:
    """Tag the heads again: initialisation on the meta device and Megatron-FSDP have created new parameters."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionBlock):
                tag_mtp_block(module)


def tag_named_groups(chunks: Iterable[torch.nn.Module], config: Any) -> None:
    """Tag the parameters whose names match a --grad-norm-group of `config`; the first match wins, tagged ones stay.

    A regular expression is searched in the name that model.named_parameters() gives on this rank, without leading
    `module.`. Copies of a tied embedding on several pipeline stages match by either of its names, since copies in
    different groups would be clipped differently and drift apart.
    """
    groups = named_groups(config)
    if not groups:
        return
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            names = [re.sub(r"^(module\.)+", "", name)]
            if getattr(param, "shared_embedding", False):
                names += _TIED_NAMES
            if tag_of(param) is None:
                match = next((group for group in groups if any(map(group.pattern.search, names))), None)
                if match is not None:
                    tag(param, match.name)
