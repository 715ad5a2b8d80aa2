"""The gradient of a word embedding that is the output weight as well: the sum over its two uses.

A fused weight gradient of the output layer goes to `main_grad`, and autograd gets a placeholder in its place. With the
placeholder the gradient of the look-up is dropped, unless the weight says that the placeholder is zero
(`zero_out_wgrad`).
"""

from __future__ import annotations

from megatron_overrides.call import Call


def add_look_ups_of_mtp_stage(call: Call) -> None:
    """Wraps LanguageModule.setup_embeddings_and_output_layer, which sets `zero_out_wgrad` for one pipeline stage alone.

    The stage of the MTP heads looks tokens up in a copy of the embedding, and computes logits by it where it has the
    output layer as well. A weight that GTP shards is left alone: GTP adds each of its gradients to `main_grad`.
    """
    call.proceed()
    model = call.instance
    if model.share_embeddings_and_output_weights and getattr(model, "mtp_process", False):
        weight = model.shared_embedding_or_output_weight()
        if not getattr(weight, "is_gtp_weight_remat", False):
            weight.zero_out_wgrad = True


def fuse_no_gradients_of_tied_outputs(call: Call) -> None:
    """Wraps FullyShardedDataParallel.__init__(config, ddp_config, module, ...) of Megatron-FSDP.

    It reads no `zero_out_wgrad`, and has one pipeline stage. An output layer without a weight takes that of the
    embedding; where it fuses no gradient, autograd adds up both.
    """
    for module in call["module"].modules():
        if getattr(module, "gradient_accumulation_fusion", False) and module.weight is None:
            module.gradient_accumulation_fusion = False
    call.proceed()
