"""The modules of a model that are its MTP heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def mtp_blocks(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the MTP blocks in some modules; the heads of Megatron's models are all in these blocks."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    for module in modules:
        yield from (child for child in module.modules() if isinstance(child, MultiTokenPredictionBlock))
