"""The wrappers that detach MTP heads, and check their weights once.

NVIDIA/Megatron-LM#3456 (detached heads; under the 1F1B overlap of experts no block runs, so the layers are marked).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.mtp.heads.detached_heads import (
    REPORTS_ZERO_EMBEDDING_GRAD,
    TAKES_MAIN_HIDDEN_STATES,
    are_detached,
    report_zero_gradient,
)


def check_heads_once(call: Call) -> Any:
    """Wraps the functions that get_forward_backward_func returns (model, forward_only, pg_collection, ... by keyword).

    Here all ranks of a model begin a step, checkpoints are loaded, and nothing has been computed with the heads. A
    check of the optimizer would come after Megatron's check of the gradients, which names no parameter.
    """
    # Imported here because that module imports the schedules.
    from megatron_overrides.mtp.heads.finite_heads import check_heads

    chunks = as_list(call["model"])
    is_first = not getattr(chunks[0], "_mtp_heads_are_checked", False)
    # A CUDA graph cannot be captured around a read on the host.
    if is_first and not call.get("forward_only") and not torch.cuda.is_current_stream_capturing():
        if getattr(get_model_config(chunks[0]), "mtp_num_layers", None):
            check_heads(chunks, call.get("pg_collection"))
        chunks[0]._mtp_heads_are_checked = True
    return call.proceed()


def detach_block(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: marks the first layer, whose input comes from the main model."""
    if are_detached(call.instance.config):
        setattr(call.instance.layers[0], TAKES_MAIN_HIDDEN_STATES, True)
    return call.proceed()


def detach_inputs(call: Call) -> tuple[Any, ...]:
    """Wraps MultiTokenPredictionLayer._get_embeddings, which returns (..., embedded tokens, hidden states)."""
    if not are_detached(call.instance.config):
        return call.proceed()
    takes_main_hidden_states = vars(call.instance).pop(TAKES_MAIN_HIDDEN_STATES, False)
    if takes_main_hidden_states:
        call["hidden_states"] = call["hidden_states"].detach()
    *rest, embedded, hidden_states = call.proceed()
    embedded = embedded.detach()
    if takes_main_hidden_states and getattr(call.instance, REPORTS_ZERO_EMBEDDING_GRAD, False):
        embedded = report_zero_gradient(embedded, call["embedding"])
    if not hidden_states.requires_grad:
        # Activation recomputation gives gradients to parameters only if one of its inputs requires a gradient.
        hidden_states.requires_grad_(True)
    return (*rest, embedded, hidden_states)


def detach_scheduled_layer(call: Call) -> Any:
    """Wraps build_mtp_layer_callables(layer); upstream does not detach here, so its MTP loss trains the main model."""
    (first, *others), backward = call.proceed()
    layer = call["layer"]

    def forward(node: Any, hidden_states: torch.Tensor) -> Any:
        if getattr(layer.config, "mtp_detach_heads", False) and node.is_first_layer:
            setattr(layer, TAKES_MAIN_HIDDEN_STATES, True)
        return first(node, hidden_states)

    return [forward, *others], backward


def tag_mtp_stage_embedding(call: Call) -> None:
    """Wraps LanguageModule.setup_embeddings_and_output_layer, which tags the first and the last stage only."""
    call.proceed()
    if getattr(call.instance, "mtp_process", False) and hasattr(call.instance, "embedding"):
        call.instance.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True


def drop_unused_output_weight(call: Call) -> None:
    """Wraps LanguageModule.setup_embeddings_and_output_layer.

    With tied embeddings the stage of the MTP heads takes the word embedding for the output layer, which has a weight
    nevertheless, unless the stage is the first one.
    """
    is_tied = call.instance.share_embeddings_and_output_weights
    if (
        is_tied
        and call.instance.post_process
        and not call.instance.pre_process
        and getattr(call.instance, "mtp_process", False)
    ):
        call.instance.output_layer.weight = None
    call.proceed()
