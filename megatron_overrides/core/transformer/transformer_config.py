"""Settings of a model with MTP heads that cannot work together."""

from __future__ import annotations

from typing import Any


def check_detached_heads(settings: Any) -> None:
    """Raise ValueError if `settings` (a TransformerConfig or Megatron's args) cannot detach the MTP heads."""
    if getattr(settings, "mtp_detach_heads", False) and getattr(settings, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "--mtp-detach-heads uses the output layer without training it, but --defer-embedding-wgrad-compute puts "
            "the weight gradient of each of its uses off: leave one of the two flags out"
        )


def check_after_init(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> None:
    """Wraps TransformerConfig.__post_init__: a configuration made without Megatron's parser is checked too."""
    wrapped(*args, **kwargs)
    check_detached_heads(instance)
