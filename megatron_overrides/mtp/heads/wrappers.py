"""The wrappers around MTP layers: detached heads, recomputation, repeated heads, and the stage that has the heads.

NVIDIA/Megatron-LM#3456 (detached heads; under the 1F1B overlap of experts no block runs, so the layers are marked),
#6760 and #4593 (full recomputation in fp8 or fp4 by the layer's own tensor-parallel group; up to 0.17
TransformerEngine's checkpoint gave no gradient to tensors passed by keyword, and Megatron's cannot save packed
sequences), #6256 (multimodal models turn the scatter of their embedding off, because they put images and audio into the
whole sequence first; an MTP layer calls that embedding itself), #6965 (the layer of repeated heads, and the output
layer of attached heads, run several times in one pass, and each backward pass of them must add its gradient).
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


def checkpoint_layer(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionLayer._checkpointed_forward: takes keywords, and up to 0.17 the function to run."""
    config = call.instance.config
    if config.recompute_method != "uniform" or config.recompute_num_layers != 1:
        return call.proceed()
    function = call.args[0] if call.args else call.instance._proj_and_transformer_layer
    names = [name for name, value in call.kwargs.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in call.kwargs.items() if name not in names}

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return function(**others, **dict(zip(names, tensors, strict=True)))

    tensors = [call.kwargs[name] for name in names]
    if config.fp8 or config.fp4:
        from megatron_overrides.mtp.heads.quantized_recompute import checkpoint_quantized

        return checkpoint_quantized(call.instance, run, tensors)
    if call.args and any(value is not None for value in others.values()):
        from megatron.core import tensor_parallel

        return tensor_parallel.checkpoint(run, config.distribute_saved_activations, *tensors)
    return call.proceed()


def accept_padding_mask(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer._checkpointed_forward.

    0.18 calls it with a `padding_mask`, which it does not accept: every MTP model with full recomputation raises
    TypeError. Upstream fixed this in NVIDIA/Megatron-LM#3457.
    """
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in call.parameters.values())
    if "padding_mask" not in call.kwargs or "padding_mask" in call.parameters or accepts_any:
        return call.proceed()
    layer = _LayerWithPaddingMask(call.instance, call.kwargs.pop("padding_mask"))
    return call.proceed(layer)


class _LayerWithPaddingMask:
    """Stands for the layer in a method that drops the mask, and adds it: in forward, and when backward recomputes."""

    def __init__(self, layer: Any, padding_mask: Any) -> None:
        self._layer = layer
        self._padding_mask = padding_mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def _proj_and_transformer_layer(self, **kwargs: Any) -> Any:
        return self._layer._proj_and_transformer_layer(padding_mask=self._padding_mask, **kwargs)


def scatter_embeddings(call: Call) -> tuple[Any, ...]:
    """Wraps MultiTokenPredictionLayer._get_embeddings, which returns (..., embedded tokens, hidden states)."""
    *rest, embedded, hidden_states = call.proceed()
    embedding = call["embedding"]
    if call.instance.config.sequence_parallel and not getattr(embedding, "scatter_to_sequence_parallel", True):
        # A layer of 0.16 has no group, and None means Megatron's own.
        from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

        embedded = scatter_to_sequence_parallel_region(embedded, group=getattr(call.instance, "tp_group", None))
    return (*rest, embedded, hidden_states)


def add_gradients_of_all_depths(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__.

    TransformerEngine overwrites a fused gradient in the backward of a call that has `is_first_microbatch=True`.
    Megatron passes that to the first depth, whose backward runs last, and None to every depth of a layer that has
    `disable_parameter_transpose_cache`: then it adds, and quantizes the weights in each call.
    """
    call.proceed()
    if _is_repeated(call.instance.config):
        for module in call.instance.modules():
            if hasattr(module, "is_first_microbatch"):
                module.disable_parameter_transpose_cache = True


def add_gradients_under_fsdp(call: Call) -> None:
    """Wraps FullyShardedDataParallel.__init__(config, ddp_config, module, ...) of Megatron-FSDP.

    It has each fused gradient overwrite the one before. What runs several times gets gradients that are not fused:
    autograd adds them up, and Megatron-FSDP takes the sum.
    """
    config = call["config"]
    for module in call["module"].modules():
        if getattr(module, "mtp_process", False) and not are_detached(config):
            _fuse_no_gradients(module.output_layer)
        if hasattr(module, "mtp_use_repeated_layer") and _is_repeated(config):
            _fuse_no_gradients(module)
    call.proceed()


def _is_repeated(config: Any) -> bool:
    return bool(getattr(config, "mtp_use_repeated_layer", False) and (config.mtp_num_layers or 0) > 1)


def _fuse_no_gradients(module: torch.nn.Module) -> None:
    for child in module.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):  # Megatron's, TransformerEngine's
            if getattr(child, name, False):
                setattr(child, name, False)


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


def detach_scheduled_layer(call: Call) -> Any:
    """Wraps build_mtp_layer_callables(layer); upstream does not detach here, so its MTP loss trains the main model."""
    (first, *others), backward = call.proceed()
    layer = call["layer"]

    def forward(node: Any, hidden_states: torch.Tensor) -> Any:
        if getattr(layer.config, "mtp_detach_heads", False) and node.is_first_layer:
            setattr(layer, TAKES_MAIN_HIDDEN_STATES, True)
        return first(node, hidden_states)

    return [forward, *others], backward
