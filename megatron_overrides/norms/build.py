"""What Megatron's optimizer package builds: checks, tags of the parameters, and FusedAdam for Megatron-FSDP.

Megatron-FSDP keeps fp32 main weights, sharded as DTensors, and gives those to the optimizer. With
--use-precision-aware-optimizer FusedAdam copied them once more, 4 bytes for each element, and waited for gradients
under a name (`decoupled_grad`) that Megatron-FSDP never used: NVIDIA/Megatron-LM#4133, #4024, #4427.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.norms.norm_tags import tag_mtp_blocks, tag_named_groups
from megatron_overrides.settings.model_settings import check_heads
from megatron_overrides.settings.names import spell
from megatron_overrides.settings.optimizer_settings import check_separate_clip, check_settings

logger = logging.getLogger(__name__)


def check_configs(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...): the first place where both configurations are known.

    A trainer without Megatron's command line may also have changed them since they were created.
    """
    settings = call["config"]
    check_settings(settings)
    of_model = next((chunk.config for chunk in _chunks(call["model_chunks"]) if hasattr(chunk, "config")), None)
    _check_places(settings, of_model)
    if getattr(of_model, "mtp_num_layers", None):
        both = SimpleNamespace(**{**vars(settings), **vars(of_model)})
        check_heads(both)
        check_separate_clip(both)
    else:
        for name in ("mtp_detach_heads", "separate_mtp_grad_clip"):
            if getattr(of_model, name, False):
                _warn_of_missing_heads(name)
    return call.proceed()


def _check_places(of_optimizer: Any, of_model: Any) -> None:
    """Raise ValueError if a setting of the patches is an attribute of the configuration that does not have the field.

    Python sets any attribute of a dataclass, and nothing would read it there.
    """
    for config, other in ((of_optimizer, of_model), (of_model, of_optimizer)):
        own, fields = (getattr(type(one), "__dataclass_fields__", {}) for one in (config, other))
        strays = vars(config).keys() - own.keys() if own else set()
        for name in sorted(strays & fields.keys()):
            # Some of them are fields of newer releases, without the mark.
            if fields[name].metadata.get("added_in_place") or "mtp" in name or "grad_norm" in name:
                raise ValueError(
                    f"{spell(name)} is set on the {type(config).__name__}, where nothing reads it: it is a field of "
                    f"the {type(other).__name__}"
                )


@functools.cache  # Megatron also asks for the groups of the experts
def _warn_of_missing_heads(name: str) -> None:
    text = f"{spell(name)} has no effect: the model has no MTP heads. Add {spell('mtp_num_layers')}"
    log_single_rank(logger, logging.WARNING, text)


def retag_mtp_heads(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...), with which every optimizer begins."""
    tag_mtp_blocks(_chunks(call["model_chunks"]))
    return call.proceed()


def tag_groups(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...): parameters get the groups of --grad-norm-group."""
    tag_named_groups(_chunks(call["model_chunks"]), call["config"])
    return call.proceed()


def _chunks(chunks: Any) -> Any:
    return chunks if isinstance(chunks, (list, tuple)) else [chunks]


def build_without_master_weights(call: Call) -> Any:
    """Wraps _get_megatron_optimizer_based_on_param_groups: what it builds over Megatron-FSDP reads `decoupled_grad`.

    Newer releases do half of it, in get_megatron_optimizer: they leave `store_param_remainders` set, although there
    are no master weights any more, and rely on the caller to have set megatron_fsdp_use_decoupled_grad. The optimizer
    makes its state in the first step, so all of this comes in time.
    """
    optimizer = call.proceed()
    if not call["config"].use_precision_aware_optimizer:
        return optimizer
    buffers = [chunk.param_and_grad_buffer for chunk in call["model_chunks"] if is_megatron_fsdp(chunk)]
    fused_adam: Any = getattr(optimizer, "optimizer", None)
    if buffers and getattr(fused_adam, "master_weights", None) is not None:
        fused_adam.master_weights = False
        fused_adam.store_param_remainders = False
        fused_adam.use_decoupled_grad = True
        for buffer in buffers:
            buffer.use_decoupled_grad = True  # from 0.18 on
            buffer.use_precision_aware_optimizer = True  # its name before, which nothing ever set
    return optimizer


def is_megatron_fsdp(chunk: Any) -> bool:
    """Whether `chunk` is a model in Megatron-FSDP. Its version 2, of main, manages gradients in another way."""
    return getattr(chunk.ddp_config, "use_megatron_fsdp", False) and hasattr(chunk, "param_and_grad_buffer")
