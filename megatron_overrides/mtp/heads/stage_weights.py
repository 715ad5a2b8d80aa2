"""The weights that the pipeline stage of MTP heads shares with the other stages: embedding and output layer."""

from __future__ import annotations

from megatron_overrides.call import Call


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
