"""MTP heads of a multimodal model, which scatters the embedded sequence itself, train as those of a language model."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("scatter-mtp-embeddings"), pytest.mark.ranks(2)]

VOCABULARY, LENGTH, BATCH = 32, 16, 2


@pytest.fixture
def train(parallel, make_gpt, norms_for_sequence_parallel, world_size):
    """train(scatters, **config): losses of all tokens and gradients, from one pass of the same model."""
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    parallel(tensor_model_parallel_size=world_size)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand(BATCH, -1).contiguous()

    def run(scatters, **settings):
        model = make_gpt(
            VOCABULARY,
            LENGTH,
            scatters=scatters,
            normalization="RMSNorm",
            tensor_model_parallel_size=world_size,
            num_attention_heads=4,
            **{"sequence_parallel": True, **settings},
        )
        embedded = model.embedding(input_ids=ids, position_ids=positions)
        if not scatters and model.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
        losses = model(
            ids,
            positions,
            torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not(),
            decoder_input=embedded,
            labels=labels,
        )
        losses.mean().backward()
        return losses, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    return run


@pytest.mark.parametrize("detached", [False, True])
def test_losses_and_gradients_are_those_of_an_embedding_that_scatters(train, detached, from_all_ranks):
    losses, gradients = train(scatters=False, mtp_detach_heads=detached)
    expected_losses, expected = train(scatters=True, mtp_detach_heads=detached)
    assert any(name.startswith("mtp.") and gradient.any() for name, gradient in gradients.items())
    same = torch.equal(losses, expected_losses) and set(gradients) == set(expected)
    same = same and all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    assert all(from_all_ranks(same))


def test_without_sequence_parallelism_nothing_is_scattered(train, from_all_ranks):
    losses, _ = train(scatters=False, sequence_parallel=False)
    expected, _ = train(scatters=True, sequence_parallel=False)
    assert all(from_all_ranks(torch.equal(losses, expected)))
