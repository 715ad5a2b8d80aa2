"""torch.compile on patched functions: the loss of the MTP heads, which rolls by a wrapped function, and acceptance.

test_compiled.py runs these tests in a process without a rehearsal, which would disable torch.compile. torch cannot
trace Megatron's own autograd function in the loss, and so compiles the functions around and below it.
"""

from __future__ import annotations

import copy

import megatron_mtp_patches  # noqa: F401
import pytest
import torch
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._dynamo.utils import counters

LENGTH, BATCH, HIDDEN, VOCABULARY, DEPTHS = 6, 2, 8, 16, 2


@pytest.fixture(scope="module", params=[False, True], ids=["attached", "detached"])
def trained(request):
    """(what plain functions give, what compiled ones give, torch's counters of what it compiled)."""
    torch._dynamo.reset()
    counters.clear()
    plain = train(request.param, lambda function: function)
    compiled = train(request.param, lambda function: torch.compile(function, backend="eager"))
    return plain, compiled, copy.deepcopy(counters)


def test_compiled_mtp_losses_and_acceptance_counts_are_the_same_to_the_bit(trained):
    plain, compiled, _ = trained
    assert [torch.equal(ours, theirs) for ours, theirs in zip(plain, compiled, strict=True)] == [True] * 4
    assert plain[2].abs().sum() > 0


def test_something_was_compiled(trained):
    *_, counted = trained
    assert counted["frames"]["ok"] > 0 and counted["stats"]["calls_captured"] > 10


def train(detached, prepare) -> list[torch.Tensor]:
    """Hidden states of the main model, acceptance counts, and gradients: of all hidden states, of the output weight."""
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

    main = prepare(loss)(hidden, weight)
    main.square().sum().backward()
    trained = torch.zeros_like(weight) if weight.grad is None else weight.grad  # detached heads train no weight
    return [main.detach(), torch.stack(prepare(count)(hidden)), hidden.grad, trained]
