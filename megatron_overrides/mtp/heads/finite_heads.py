"""Name the parameters of MTP heads that are not finite, before the first training step runs on them.

Megatron-Bridge leaves heads that a checkpoint lacks uninitialized. Where the main model is frozen, its loss stays
finite. Only Megatron's check of the gradients notices; it names no parameter and may be off (`check_for_nan_in_grad`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import to_local_if_dtensor

from megatron_overrides.model_chunks import plain_name
from megatron_overrides.model_ranks import is_on_any_rank
from megatron_overrides.mtp.blocks import mtp_blocks
from megatron_overrides.settings.checks import spell

_SHOWN = 4


@torch.no_grad()
def check_heads(chunks: Sequence[torch.nn.Module], process_groups: Any) -> None:
    """Read the parameters of all heads once. A collective of all ranks of the model, whether they have heads or not.

    Parameters that are kept in fp8 or fp4 are not read.

    Args:
        process_groups: as in `is_on_any_rank`.

    Raises:
        ValueError: on all ranks, if any rank has a parameter with inf or NaN.
    """
    broken = [name for name, param in parameters_of_heads(chunks) if not _is_finite(param)]
    if not is_on_any_rank(bool(broken), process_groups):
        return
    raise ValueError(
        f"MTP heads are not finite before the first training step: "
        f"{listed(broken) if broken else 'the message of another rank names the parameters'}. Either nothing has "
        f"initialized them or the checkpoint has them so. Megatron-Bridge initializes heads that a Hugging Face "
        f"checkpoint lacks only with model.perform_initialization=True; Megatron-LM initializes none with "
        f"--no-initialization. To train without heads, leave out {spell('mtp_num_layers')}"
    )


def parameters_of_heads(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of all heads on this rank, by the names that the model gives them."""
    heads = {id(param) for block in mtp_blocks(chunks) for param in block.parameters()}
    named = (pair for chunk in chunks for pair in chunk.named_parameters())
    return [(plain_name(name), param) for name, param in named if id(param) in heads]


def listed(names: Sequence[str]) -> str:
    """Return some names for an error message, and how many there are besides."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _is_finite(param: torch.nn.Parameter) -> bool:
    values = to_local_if_dtensor(param.detach())
    is_quantized = type(values) is not torch.Tensor or not values.is_floating_point()
    return is_quantized or bool(torch.isfinite(values).all())
