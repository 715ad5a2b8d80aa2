"""Tag the word embedding of the MTP stage, so that optimizers treat it as an embedding."""

from __future__ import annotations

from typing import Any


def tag_mtp_stage_embedding(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps LanguageModule.setup_embeddings_and_output_layer, which tags the first and the last stage only."""
    wrapped(*args, **kwargs)
    if getattr(instance, "mtp_process", False) and hasattr(instance, "embedding"):
        instance.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
