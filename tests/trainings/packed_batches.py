"""Random packs of sequences with padding, and what Megatron's MTP code makes of them."""

import inspect
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_token_prediction as mtp

from tests.oracles.losses.packs import Pack

DEPTHS = 3


def packs(ranks: int = 1) -> st.SearchStrategy[Pack]:
    """Packs with short, empty and full sequences; over more than one rank, slots that context parallelism can cut."""
    unit = 2 * ranks if ranks > 1 else 1

    def with_slots(sequence: tuple[int, int]) -> tuple[int, int]:
        tokens, padding = sequence
        return tokens, -(-(tokens + padding) // unit) * unit

    sequence = st.tuples(st.integers(0, 9), st.integers(0, 5)).map(with_slots)
    packs = st.builds(
        Pack, st.lists(sequence, min_size=1, max_size=6).map(tuple), st.integers(0, 3).map(lambda n: n * ranks)
    )
    return packs.filter(lambda pack: pack.size > 0)


class Heads(NamedTuple):
    """Of each head the targets, and the weight of each slot in its loss."""

    targets: list
    weights: list


def heads(pack, rank=0, ranks=1, cp_group=None, **arguments):
    """Return the heads of this rank, where each target has a loss of 1.

    `arguments` of process_mtp_loss may be lists over the whole pack.
    """
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=DEPTHS)
    config.mtp_loss_scaling_factor = DEPTHS
    config.calculate_per_token_loss = True
    tensors = {
        name: torch.tensor([pack.of_rank(value, rank, ranks)]) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    hidden = torch.zeros((1 + DEPTHS) * pack.size // ranks, 1, 4, requires_grad=True)
    seen = Heads([], [])

    def compute_loss(labels, logits):
        seen.targets.append(labels.tolist()[0])
        return torch.ones(labels.shape)

    def attach(main, loss):
        seen.weights.append(loss.tolist()[0])
        return main

    with patch.object(mtp.MTPLossAutoScaler, "apply", attach):
        mtp.process_mtp_loss(
            hidden,
            tensors.pop("labels", None),
            tensors.pop("loss_mask", None),
            lambda head, weight, runtime_gather_output: (head, None),
            None,
            True,
            False,
            compute_loss,
            config,
            cp_group=cp_group,
            packed_seq_params=pack.params(),
            **tensors,
        )
    return seen


def expected_heads(pack, rank=0, ranks=1, *, labels=None, tokens=None, loss_mask=None):
    """Return what `heads` should return, from rolls of the whole pack."""
    targets, mask = tokens if labels is None else labels, loss_mask or pack.holds_token
    if labels is None:
        targets, mask = pack.roll(targets), pack.roll(mask)
    # A head predicts fewer tokens than the main model, and weighs each by that much more.
    main_tokens = sum(mask)
    expected = Heads([], [])
    for _ in range(DEPTHS):
        targets, mask = pack.roll(targets), pack.roll(mask)
        expected.targets.append(pack.of_rank(targets, rank, ranks))
        expected.weights.append(
            [weight * main_tokens / max(sum(mask), 1) for weight in pack.of_rank(mask, rank, ranks)]
        )
    return expected


def layer_inputs(pack, rank=0, ranks=1, cp_group=None):
    """Return what the first MTP layer rolls: tokens, positions and, from 0.18 on, a padding mask with some tokens."""
    names = list(inspect.signature(mtp.MultiTokenPredictionLayer._get_embeddings).parameters)
    tensors = {
        name: torch.tensor([pack.of_rank(values, rank, ranks)])
        for name, values in _rolled_inputs(pack).items()
        if name in names
    }
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=1)
    actual = mtp.MultiTokenPredictionLayer._get_embeddings(
        SimpleNamespace(config=config, cp_group=cp_group),
        embedding=lambda input_ids, position_ids: input_ids,
        hidden_states=torch.zeros(pack.size // ranks, 1, 4),
        packed_seq_params=pack.params(),
        **tensors,
    )
    return {name: tensor.tolist()[0] for name, tensor in zip(tensors, actual, strict=False)}


def expected_layer_inputs(actual, pack, rank=0, ranks=1):
    """Return what `layer_inputs` returns, from rolls of the whole pack."""
    rolled = {name: pack.roll(values, fill=name == "padding_mask") for name, values in _rolled_inputs(pack).items()}
    return {name: pack.of_rank(rolled[name], rank, ranks) for name in actual}


def _rolled_inputs(pack):
    tokens = list(range(1, pack.size + 1))
    masked = [not token or number % 4 == 0 for token, number in zip(pack.holds_token, tokens, strict=True)]
    return {"input_ids": tokens, "position_ids": [token + 1 for token in tokens], "padding_mask": masked}
