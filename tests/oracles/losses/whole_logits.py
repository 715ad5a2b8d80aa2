"""The losses for acceptance of a HeadTraining's step, from the logits of all positions in float64."""

from __future__ import annotations

from typing import Any

import torch


def whole_logits(training: Any) -> list[list[torch.Tensor]]:
    """Logits [s, b, v] of the heads and, last, of the main model, for each microbatch of a step with cross entropy."""
    chunk = training.bare[-1]
    seen = []
    if chunk.post_process:
        chunk.output_layer.register_forward_hook(lambda layer, args, output: seen.append(output[0].detach().double()))
    training.step(0)
    size = 1 + chunk.config.mtp_num_layers
    return [seen[first : first + size] for first in range(0, len(seen), size)]


def expected_losses(logits: list[torch.Tensor], loss_type: str) -> list[float]:
    """The loss of each head as it is logged: a mean over the positions whose label that far is in the sequence."""
    *heads, main = (each.softmax(-1) for each in logits)
    length = main.size(0)
    overlaps = [torch.minimum(main[d:], head[: length - d]).sum(-1) for d, head in enumerate(heads, start=1)]
    if loss_type == "tv":
        return [1 - overlap.mean().item() for overlap in overlaps]
    prefixes = torch.stack([overlap[: length - len(heads)] for overlap in overlaps]).cumprod(0)
    return [1 - prefix.mean().item() for prefix in prefixes]
