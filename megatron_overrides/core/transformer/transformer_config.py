"""Refuse settings of MTP heads that cannot work together."""

from __future__ import annotations

from typing import Any


def check_heads(settings: Any) -> None:
    """Raise ValueError if `settings` (a TransformerConfig or Megatron's args) ask of MTP heads what cannot work."""
    interval = getattr(settings, "mtp_acceptance_interval", 1)
    if interval < 0:
        raise ValueError(f"--mtp-acceptance-interval {interval}: give a number of steps, or 0 to count in none")
    graphs = [str(getattr(settings, f"cuda_graph_{kind}", "")) for kind in ("impl", "scope", "modules")]
    if interval > 1 and any("full_iteration" in graph for graph in graphs):
        raise ValueError(
            "--mtp-acceptance-interval decides in each step whether to count, but a CUDA graph of the whole iteration "
            "repeats the step that it was captured in: set the interval to 1 or 0"
        )
    if getattr(settings, "mtp_detach_heads", False) and getattr(settings, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            "--mtp-detach-heads uses the output layer without training it, but --defer-embedding-wgrad-compute "
            "computes a weight gradient for each of its uses later: leave one of the two flags out"
        )


def check_after_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps TransformerConfig.__post_init__: checks a configuration that does not come from Megatron's parser, too."""
    wrapped(*args, **kwargs)
    check_heads(instance)
