"""Which CUDA graphs a run has."""

from __future__ import annotations

import re
from typing import Any


def captures_whole_iteration(settings: Any) -> bool:
    """Whether a CUDA graph repeats a whole training iteration, the losses included.

    Args:
        settings: a TransformerConfig or Megatron's args. The graph is a `cuda_graph_scope` up to 0.17, and a
            `cuda_graph_impl` from 0.18 on; "full_iteration_inference" is another one.
    """
    graphs = (str(getattr(settings, f"cuda_graph_{kind}", "")) for kind in ("impl", "scope", "modules"))
    return any(re.search(r"full_iteration\b", graph) for graph in graphs)
