"""MTP heads over several ranks: labels, acceptance and detached gradients are those of one rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("mtp-acceptance-rate", "detach-mtp-heads", "drop-unused-output-weight"),
    pytest.mark.ranks(2),
]

VOCABULARY, LENGTH, BATCH = 32, 16, 2


@pytest.fixture
def tokens():
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def make_model(make_gpt):
    return partial(make_gpt, VOCABULARY, LENGTH, normalization="RMSNorm")


@pytest.fixture(autouse=True)
def fresh_tracker():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}
    yield
    MTPLossLoggingHelper.tracker = {}


@pytest.mark.ranks(2, 4)
def test_the_largest_logit_over_all_vocabulary_shards_in_one_collective(parallel, rank, world_size, count_collectives):
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import _vocab_parallel_argmax

    parallel(tensor_model_parallel_size=world_size)
    logits = torch.randn(LENGTH, BATCH, VOCABULARY, generator=torch.Generator().manual_seed(3)).bfloat16()
    group = parallel_state.get_tensor_model_parallel_group()
    count_collectives.clear()
    largest = _vocab_parallel_argmax(logits.chunk(world_size, dim=-1)[rank], group, world_size)
    assert count_collectives == ["all_gather_into_tensor"]
    values = logits.gather(-1, largest.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(values, logits.max(dim=-1).values) and largest.dtype == torch.int64


def run(model, tokens):
    labels, ids = tokens[:, 1:].contiguous(), tokens[:, :-1].contiguous()
    loss = model(
        ids,
        torch.arange(LENGTH).expand(BATCH, -1),
        torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not(),
        labels=labels,
    )
    (0.0 * loss.mean()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def test_data_parallel_ranks_add_their_counts(parallel, make_model, tokens, from_all_ranks, count_collectives):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

    parallel()
    run(make_model(), tokens.roll(dist.get_rank(), 1))
    mine = from_all_ranks([Helper.tracker["correct_values"], Helper.tracker["total_values"]])
    count_collectives.clear()
    Helper.reduce_metrics_in_tracker()
    assert count_collectives == ["all_reduce"] * 2  # the losses, the counts
    for place, key in enumerate(("correct_values", "total_values")):
        assert torch.equal(Helper.tracker[key], sum(counts[place] for counts in mine))


@pytest.mark.ranks(2, 4)
def test_context_parallel_ranks_derive_the_labels_of_one_rank(parallel, tokens, rank, from_all_ranks):
    """Each rank has two chunks of the sequence, the r-th from its begin and the r-th from its end."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    place = group.rank()
    positions = torch.arange(LENGTH).chunk(4)
    mine = torch.cat([positions[place], positions[3 - place]])
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=2)

    def derive(ids, cp_group):
        seen = []

        def compute_loss(labels, logits):
            seen.append(labels.clone())
            return torch.ones(labels.shape)

        hidden = torch.zeros(3 * ids.size(1), BATCH, 4, requires_grad=True)
        output_layer = lambda head, weight, runtime_gather_output: (head, None)  # noqa: E731
        process_mtp_loss(
            hidden, None, None, output_layer, None, True, False, compute_loss, config, cp_group=cp_group, input_ids=ids
        )
        return seen

    ids = tokens[:, :LENGTH].contiguous()
    for whole, part in zip(derive(ids, None), derive(ids[:, mine].contiguous(), group), strict=True):
        assert torch.equal(part, whole[:, mine])


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_with_overlapped_gradients_train_the_heads_alone(parallel, make_model, tokens, rank, tied):
    """Twice, because DDP asserts in the second step that each parameter has reported a gradient."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    state = parallel(pipeline_model_parallel_size=2)
    bare = make_model(tied, mtp_detach_heads=True, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(overlap_grad_reduce=True), bare)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = model.no_sync
    labels, ids = tokens[:, 1:].contiguous(), tokens[:, :-1].contiguous()
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()

    def forward_step(iterator, model):
        loss = model(ids, torch.arange(LENGTH).expand(BATCH, -1), mask, labels=labels)
        return loss, lambda loss: (0.0 * loss.mean(), {})

    for _ in range(2):
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([]),
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        trained = {name for name, param in bare.named_parameters() if param.main_grad.any()}
        heads = {name for name, _ in bare.named_parameters() if name.startswith("mtp.")}
        assert trained == heads and bool(heads) is state.is_pipeline_last_stage()
