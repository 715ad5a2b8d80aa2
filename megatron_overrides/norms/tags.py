"""Tag parameters with their norm groups: the MTP heads, then what --grad-norm-group names (NVIDIA/Megatron-LM#4116).

The tag of the MTP heads is `grad_norm_group = "mtp"`; the original pull request calls it `is_mtp_param`, which is set
as well. The patches tag while the model and its optimizer are built. `megatron_mtp_patches.functional.tag` tags those
of a Megatron without the patches, in which the optimizer may have copied the parameters already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list, plain_name
from megatron_overrides.mtp.blocks import mtp_blocks
from megatron_overrides.norms.groups import (
    MTP_GRAD_NORM_GROUP,
    copy_optimizer_param_metadata,
    named_groups,
    tag,
    tagged_group,
)
from megatron_overrides.norms.optimizer_tree import check_optimizer, leaves

_TIED_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")
# Attributes of Megatron's optimizers: lists of lists of parameters, and of what the optimizer has made of each.
_COPIES = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("model_float16_groups", "shard_float16_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


def tag_mtp_block(block: torch.nn.Module) -> None:
    """Tag all parameters of an MTP block whose gradients are to be clipped separately; nothing else is in a block."""
    config: Any = block.config
    if getattr(config, "mtp_detach_heads", False) or config.separate_mtp_grad_clip:
        for param in block.parameters():
            tag(param, MTP_GRAD_NORM_GROUP)


def tag_mtp_blocks(chunks: Iterable[torch.nn.Module]) -> None:
    """Tag the heads again: initialisation on the meta device and Megatron-FSDP have created new parameters."""
    for block in mtp_blocks(chunks):
        tag_mtp_block(block)


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
            names = [plain_name(name)]
            if getattr(param, "shared_embedding", False):
                names += _TIED_NAMES
            if tagged_group(param) is None:
                match = next((group for group in groups if any(map(group.pattern.search, names))), None)
                if match is not None:
                    tag(param, match.name)


def tag_matching(
    model: torch.nn.Module | Sequence[torch.nn.Module], optimizer: Any, group: str, match: Callable[[str], bool]
) -> list[str]:
    """Tag the parameters whose `plain_name` matches, and what `optimizer` (None: not built yet) has made of them.

    Returns:
        The names that match on this rank.

    Raises:
        TypeError: a chunk is not a torch.nn.Module, or `optimizer` is not a Megatron optimizer.
    """
    if optimizer is not None:
        check_optimizer(optimizer)
    chunks = as_list(model)
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise TypeError(f"tag takes a model, or the list of its chunks, not a {type(chunk).__name__}")
    named = [(plain_name(name), param) for chunk in chunks for name, param in chunk.named_parameters()]
    tagged = [(name, param) for name, param in named if match(name)]
    for _, param in tagged:
        tag(param, group)
    for leaf in leaves(optimizer) if optimizer is not None else ():
        for param, param_copy in _copies(leaf):
            copy_optimizer_param_metadata(param_copy, param)
    return [name for name, _ in tagged]


def _copies(leaf: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter of the model with its main copy or shard in an optimizer that makes some."""
    for names in _COPIES:
        for params, copies in zip(*(getattr(leaf, name, ()) for name in names), strict=False):
            yield from (pair for pair in zip(params, copies, strict=True) if pair[1] is not None)


def tag_block(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__: tags the parameters of the new block."""
    call.proceed()
    tag_mtp_block(call.instance)


def retag_mtp_heads(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...), with which every optimizer begins."""
    tag_mtp_blocks(as_list(call["model_chunks"]))
    return call.proceed()


def tag_groups(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...): parameters get the groups of --grad-norm-group."""
    tag_named_groups(as_list(call["model_chunks"]), call["config"])
    return call.proceed()


def copy_grad_norm_tags(call: Call) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source), called for every shard and main copy."""
    call.proceed()
    group = tagged_group(call["source_tensor"])
    if group is not None:
        tag(call["destination_tensor"], group)
