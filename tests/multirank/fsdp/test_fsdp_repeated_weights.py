"""Under Megatron-FSDP a weight that runs several times in a pass gets the gradients of all its uses, as under DDP."""

import dataclasses

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import rehearsal

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("sum-gradients-of-repeated-weights", "keep-gradients-of-tied-embeddings"),
    pytest.mark.ranks(2),
]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
needs_transformer_engine = pytest.mark.skipif(
    not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed"
)
VOCABULARY, LENGTH = 32, 12
FUSED = {"gradient_accumulation_fusion": True}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}


@pytest.fixture
def batch():
    """Other tokens on each rank."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(2, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not(),
        "labels": tokens[:, 1:].contiguous(),
    }


@pytest.fixture
def gradients(make_gpt, make_fsdp, parallel, request):
    """(under_fsdp(strategy, **settings), right(**settings)): {name: the ranks' mean gradient} of one microbatch each.

    What is right is computed without sharding and without fusion.
    """
    batch = request.getfixturevalue("batch")  # after `parallel`

    def under_fsdp(strategy, **settings):
        training = make_fsdp(
            strategy, torch.float32, net=make_gpt(VOCABULARY, LENGTH, **settings), use_precision_aware_optimizer=False
        )
        training.optimizer.zero_grad()
        with training.model.no_sync():
            pass  # as Megatron's schedules leave it before the last microbatch
        training.model(**batch).mean().backward()
        training.model.finish_grad_sync()
        named = training.model.module.param_and_grad_buffer.optimizer_named_parameters
        whole = _local if strategy == "no_shard" else _whole
        return {name.removeprefix("module."): whole(param.grad) for name, param in named}

    def right(**settings):
        net = make_gpt(VOCABULARY, LENGTH, **settings)
        net(**batch).mean().backward()
        for param in net.parameters():
            if param.grad is not None:
                torch.distributed.all_reduce(param.grad)
                param.grad /= torch.distributed.get_world_size()
        return {name: param.grad.flatten() for name, param in net.named_parameters() if param.grad is not None}

    return under_fsdp, right


def _local(gradient):
    return None if gradient is None else gradient._local_tensor.flatten()


def _whole(gradient):
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, _local(gradient))
    return torch.cat([each for each in ranks if each is not None] or [torch.empty(0)])


def check(gradients, strategy, **settings):
    under_fsdp, right = gradients
    actual = under_fsdp(strategy, **FUSED, **settings)
    for name, gradient in right(**settings).items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "loss, tied, strategy",
    [
        ({}, False, "optim_grads"),
        ({"mtp_logits_chunk_size": 5}, True, "optim_grads_params"),
        ({"mtp_loss_type": "kl"}, False, "optim"),
        ({"mtp_loss_type": "kl"}, True, "optim_grads"),
    ],
    ids=["whole-untied-optim_grads", "chunks-tied-optim_grads_params", "kl-untied-optim", "kl-tied-optim_grads"],
)
@needs_transformer_engine
def test_the_output_weight_of_attached_heads(gradients, strategy, tied, loss):
    check(gradients, strategy, tied=tied, **loss)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.skipif(
    "mtp_use_repeated_layer" not in {field.name for field in dataclasses.fields(TransformerConfig)},
    reason="0.16 has no repeated heads",
)
@needs_transformer_engine
def test_a_repeated_head(gradients, strategy):
    check(gradients, strategy, transformer_engine=True, mtp_detach_heads=True, **REPEATED)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
@needs_transformer_engine
def test_the_look_up_and_the_output_layer_of_a_tied_embedding(gradients, strategy):
    check(gradients, strategy, tied=True, mtp_num_layers=None)


@needs_transformer_engine
def test_they_do_so_beside_detached_heads(gradients):
    check(gradients, "optim_grads_params", tied=True, mtp_detach_heads=True)


def test_an_output_layer_with_a_weight_stays_fused(make_fsdp):
    net = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 1, bias=False))
    for layer in net:
        layer.gradient_accumulation_fusion = True
    net[1].weight = None
    net.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    make_fsdp("optim_grads", torch.float32, net=net, use_precision_aware_optimizer=False)
    assert [layer.gradient_accumulation_fusion for layer in net] == [True, False]
