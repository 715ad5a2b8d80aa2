"""The stage of the MTP heads: tag its word embedding as an embedding, drop an output weight that nothing uses."""

from __future__ import annotations

from typing import Any


def tag_mtp_stage_embedding(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps LanguageModule.setup_embeddings_and_output_layer, which tags the first and the last stage only."""
    wrapped(*args, **kwargs)
    if getattr(instance, "mtp_process", False) and hasattr(instance, "embedding"):
        instance.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True


def drop_unused_output_weight(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps LanguageModule.setup_embeddings_and_output_layer.

    With tied embeddings the stage of the MTP heads takes the word embedding for the output layer, which has a weight
    nevertheless, unless the stage is the first one.
    """
    is_tied = instance.share_embeddings_and_output_weights
    if is_tied and instance.post_process and not instance.pre_process and getattr(instance, "mtp_process", False):
        instance.output_layer.weight = None
    wrapped(*args, **kwargs)
