"""Tag the parameters of the MTP heads, so that the optimizer can clip them separately.

NVIDIA/Megatron-LM#4116. The tag is `grad_norm_group = "mtp"`; the original pull request calls it `is_mtp_param`, which
is set as well.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_overrides.core.optimizer.grad_norm_groups import MTP_GRAD_NORM_GROUP


def tag_block(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps MultiTokenPredictionBlock.__init__: tags the parameters of the new block."""
    wrapped(*args, **kwargs)
    tag_parameters(instance)


def tag_again(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps _get_param_groups(model_chunks, ...), which is called first when an optimizer is built: tags again.

    Initialisation on the meta device and Megatron-FSDP create new parameters after the model was built.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    chunks = inspect.signature(wrapped).bind(*args, **kwargs).arguments["model_chunks"]
    for chunk in chunks if isinstance(chunks, (list, tuple)) else [chunks]:
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionBlock):
                tag_parameters(module)
    return wrapped(*args, **kwargs)


def tag_parameters(block: torch.nn.Module) -> None:
    """Tag all parameters of an MTP block, if its gradients are clipped separately. A block holds heads only."""
    config: Any = block.config
    if getattr(config, "mtp_detach_heads", False) or config.separate_mtp_grad_clip:
        for parameter in block.parameters():
            parameter.grad_norm_group = MTP_GRAD_NORM_GROUP
            parameter.is_mtp_param = True
