"""torch.compile on patched functions: the loss of the MTP heads, which rolls by a wrapped function, and acceptance.

torch cannot trace Megatron's own autograd function in the loss, and so compiles the functions around and below it.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._dynamo.utils import counters

LENGTH, BATCH, HIDDEN, VOCABULARY, DEPTHS = 6, 2, 8, 16, 2


def look() -> dict:
    report = {}
    for detached in (False, True):
        report["detached" if detached else "attached"] = compare(detached)
    return report


def compare(detached: bool) -> dict:
    torch._dynamo.reset()
    counters.clear()
    plain = train(detached, lambda function: function)
    compiled = train(detached, lambda function: torch.compile(function, backend="eager"))
    same = [torch.equal(ours, theirs) for ours, theirs in zip(plain, compiled, strict=True)]
    return {
        "same": same,
        "gradient": float(plain[2].abs().sum()),
        "frames": counters["frames"]["ok"],
        "calls": counters["stats"]["calls_captured"],
    }


def train(detached: bool, prepare) -> list[torch.Tensor]:
    """Hidden states of the trunk, acceptance counts, and the gradients of all hidden states and the output weight."""
    settings = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 1, "mtp_num_layers": DEPTHS}
    config = TransformerConfig(**settings, mtp_detach_heads=detached)
    seeded = torch.Generator().manual_seed(5)
    hidden = torch.randn((1 + DEPTHS) * LENGTH, BATCH, HIDDEN, generator=seeded, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=seeded, requires_grad=True)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=seeded)
    mask = torch.ones(BATCH, LENGTH)

    def output_layer(states, weight=None, runtime_gather_output=None):
        return torch.nn.functional.linear(states, weight), None

    def cross_entropy(labels, logits):
        return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    def loss(hidden, weight):
        arguments = (hidden, labels, mask, output_layer, weight, None, False, cross_entropy, config)
        return mtp.process_mtp_loss(*arguments)

    def count(hidden):
        logits, _ = output_layer(hidden[:LENGTH], weight)
        return mtp._compute_mtp_acceptance_counts(logits, labels, mask, output_layer, True)

    trunk = prepare(loss)(hidden, weight)
    trunk.square().sum().backward()
    trained = torch.zeros_like(weight) if weight.grad is None else weight.grad  # detached heads train no weight
    return [trunk.detach(), torch.stack(prepare(count)(hidden)), hidden.grad, trained]
