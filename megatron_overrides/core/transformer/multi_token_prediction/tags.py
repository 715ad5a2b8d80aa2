"""Mark the parameters of the MTP heads, so that the optimizer can clip them on their own.

NVIDIA/Megatron-LM#4116. The tag is `grad_norm_group = "mtp"`; `is_mtp_param` says the same in the words of the original
pull request.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_overrides.core.optimizer.grad_norm_groups import MTP_GRAD_NORM_GROUP


def tag_block(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps MultiTokenPredictionBlock.__init__."""
    wrapped(*args, **kwargs)
    tag_parameters(instance)


def tag_again(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps _get_param_groups(model_chunks, ...), with which every optimizer begins.

    Initialisation on the meta device and Megatron-FSDP have made new parameters since the model was built.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    chunks = inspect.signature(wrapped).bind(*args, **kwargs).arguments["model_chunks"]
    for chunk in chunks if isinstance(chunks, (list, tuple)) else [chunks]:
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionBlock):
                tag_parameters(module)
    return wrapped(*args, **kwargs)


def tag_parameters(block: torch.nn.Module) -> None:
    """Tag all parameters of an MTP block whose gradients are to be clipped separately; nothing else is in a block."""
    config: Any = block.config
    if getattr(config, "mtp_detach_heads", False) or config.separate_mtp_grad_clip:
        for parameter in block.parameters():
            parameter.grad_norm_group = MTP_GRAD_NORM_GROUP
            parameter.is_mtp_param = True
