"""Megatron-Bridge: MTP heads that a Hugging Face checkpoint lacks, at its load and at an export into its layout."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.model_ranks import is_on_any_rank, warn_on_last_rank
from megatron_overrides.mtp.heads.finite_heads import listed, parameters_of_heads

logger = logging.getLogger(__name__)

Named = list[tuple[str, torch.nn.Parameter]]


def initialize_model(call: Call) -> Any:
    """Wraps provide_distributed_model(...) of a provider: with `mtp_init` the model is built initialized.

    Megatron-Bridge turns initialization off for a model that it loads. What the checkpoint has is loaded over it.
    """
    if getattr(call.instance, "mtp_init", None):
        call.instance.perform_initialization = True
    return call.proceed()


def initialize_heads(call: Call) -> Any:
    """Wraps load_weights_hf_to_megatron(hf_pretrained, megatron_model, ...): `mtp_init` fills the heads that it lacks.

    Raises:
        ValueError: on all ranks of the model, if the checkpoint has some of the weights of the heads, if the model has
            no heads, or for last-layer, if a head has another kind of layer than the end of the main model.
    """
    result = call.proceed()
    chunks = unwrap_model(as_list(call["megatron_model"]))
    config = get_model_config(chunks[0])
    start = getattr(config, "mtp_init", None)
    if start is None:
        return result
    if not getattr(config, "mtp_num_layers", None):
        raise ValueError(
            f"model.mtp_init={start} initializes MTP heads, and the model has none: write their number into "
            f"config.json, as num_nextn_predict_layers or what its architecture calls it"
        )
    lacking, loaded = split_heads(call.instance.build_conversion_tasks(call["hf_pretrained"], chunks), chunks)
    groups = getattr(chunks[0], "pg_collection", None)
    if not is_on_any_rank(bool(lacking), groups):
        return result
    source = _name(call["hf_pretrained"])
    if is_on_any_rank(bool(loaded), groups):
        raise ValueError(
            f"model.mtp_init={start} initializes all MTP heads, but the checkpoint {source} has some of their weights. "
            f"It lacks {listed_here(lacking)}. Set as many heads as it has, or load a checkpoint without heads"
        )
    if not config.perform_initialization:
        raise ValueError(f"model.mtp_init={start} needs an initialized model: set model.perform_initialization=True")
    if start == "last-layer":
        from megatron_overrides.mtp.new_heads.initialization import initialize_from_last_layer

        initialize_from_last_layer([_language_model(chunk) for chunk in chunks])
    text = (
        f"The checkpoint {source} has no MTP heads: they were initialized ({start}). A run that resumes loads its own "
        f"checkpoint after this, which replaces them"
    )
    warn_on_last_rank(logger, text)
    return result


def refuse_uninitialized_heads(call: Call) -> Any:
    """Wraps load_weights_hf_to_megatron(hf_pretrained, megatron_model, ...) of a MegatronModelBridge.

    It may be memory of any values, so it is not enough to look at them. A Megatron checkpoint that is loaded later may
    have the heads; a run that resumes from one costs their initialization nothing but time.

    Raises:
        ValueError: on all ranks of the model, if there is such a head.
    """
    result = call.proceed()
    source = call["hf_pretrained"]
    chunks = unwrap_model(as_list(call["megatron_model"]))
    config = get_model_config(chunks[0])
    if config.perform_initialization or not getattr(config, "mtp_num_layers", None):
        return result
    lacking, _ = split_heads(call.instance.build_conversion_tasks(source, chunks), chunks)
    empty = [(name, param) for name, param in lacking if param._version == 0]
    if is_on_any_rank(bool(empty), getattr(chunks[0], "pg_collection", None)):
        raise ValueError(
            f"The checkpoint {_name(source)} lacks weights of the MTP heads, and nothing has initialized them: "
            f"{listed_here(empty)}. Set model.mtp_init to last-layer or random to train new heads "
            f"(so does model.perform_initialization=True, which Megatron-Bridge sets to False for a model that it "
            f"loads), or write num_nextn_predict_layers 0 into config.json to have no heads"
        )
    return result


def name_heads_left_out(call: Call) -> Any:
    """Wraps stream_weights_megatron_to_hf(megatron_model, hf_pretrained, ...): names the heads that it leaves out."""
    source = call["hf_pretrained"]
    chunks = unwrap_model(as_list(call["megatron_model"]))
    if call["conversion_tasks"] is None and getattr(get_model_config(chunks[0]), "mtp_num_layers", None):
        lacking, _ = split_heads(call.instance.build_conversion_tasks(source, chunks), chunks)
        if is_on_any_rank(bool(lacking), getattr(chunks[0], "pg_collection", None)):
            warn_on_last_rank(logger, _describe_left_out(source, lacking))
    return call.proceed()


def _language_model(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model with decoder and heads in a chunk, which is a part of it in a model of images and text."""
    models = (part for part in chunk.modules() if hasattr(part, "mtp_process") and hasattr(part, "decoder"))
    return next(models, chunk)


def split_heads(tasks: Iterable[Any], chunks: Sequence[torch.nn.Module]) -> tuple[Named, Named]:
    """Return the parameters of the heads on this rank that a checkpoint lacks, and those that it has; no adapters.

    Args:
        tasks: Bridge's conversion tasks for this checkpoint and this model; None where it lacks a tensor.
        chunks: models such as GPTModel, without wrappers.
    """
    filled = {id(task.param_weight) for task in tasks if task is not None}
    lacking: Named = []
    present: Named = []
    for name, param in parameters_of_heads(chunks):
        if ".adapter." in name:
            continue
        (present if id(param) in filled else lacking).append((name, param))
    return lacking, present


def listed_here(params: Named) -> str:
    """Some names for an error message that all ranks raise."""
    return listed([name for name, _ in params]) if params else "another rank names them"


def _describe_left_out(source: Any, lacking: Named) -> str:
    names = listed_here(lacking)
    if hasattr(source, "model_name_or_path"):  # a checkpoint, and not a configuration alone
        return (
            f"This export leaves out trained MTP heads, because the checkpoint {_name(source)} lacks tensors of their "
            f"names: {names}. AutoBridge.from_hf_config(config), with the number of heads in the config, exports them"
        )
    return (
        f"This {type(source).__name__} gives no names to MTP heads of the model, so Megatron-Bridge cannot export "
        f"them: {names}. Write the number of heads into it, as num_nextn_predict_layers or what its architecture "
        f"calls it"
    )


def _name(source: Any) -> Any:
    return getattr(source, "model_name_or_path", source)
