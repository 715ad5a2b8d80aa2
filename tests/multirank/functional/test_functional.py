"""The functions for custom trainers, without the patches, have the bits of the patched Megatron over ranks, too."""

import pytest
import torch
from megatron.core.transformer import multi_token_prediction as mtp
from megatron_mtp_patches import functional

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]

VOCABULARY, LENGTH, BATCH, DEPTHS = 32, 16, 2, 2
LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2, sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2},
}


def on_this_rank(rank, layout, tensor, dim):
    """The part of [..., s, ...] that this rank has."""
    if "context_parallel_size" in layout:
        chunks = tensor.chunk(4, dim)
        return torch.cat([chunks[rank], chunks[3 - rank]], dim)
    return tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["cross_entropy", "e2e_tv"])
def test_the_loss_has_the_bits_of_the_patches(rank, parallel, make_gpt, unpatched, layout, loss_type):
    layout = LAYOUTS[layout]
    sizes = {name: size for name, size in layout.items() if name.endswith("_size")}
    state = parallel(**sizes)
    settings = {"mtp_loss_type": loss_type, "mtp_acceptance_length_interval": 1, **layout}
    model = make_gpt(VOCABULARY, LENGTH, transformer_engine=True, **settings)
    generator = torch.Generator().manual_seed(3)
    hidden = [
        on_this_rank(rank, layout, torch.randn(LENGTH, BATCH, 16, generator=generator), 0) for _ in range(1 + DEPTHS)
    ]
    if "sequence_parallel" in layout:
        hidden = [each.chunk(2)[rank] for each in hidden]
    labels = on_this_rank(rank, layout, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator), 1)
    mask = on_this_rank(rank, layout, (torch.rand(BATCH, LENGTH, generator=generator) > 0.2).float(), 1)
    groups = {
        "tp_group": state.get_tensor_model_parallel_group(),
        "cp_group": state.get_context_parallel_group(),
    }

    mtp.MTPLossLoggingHelper.tracker = {}
    rows = torch.cat(hidden).requires_grad_()
    arguments = (model.output_layer, None, None, True, model.compute_language_model_loss, model.config)
    main = mtp.process_mtp_loss(rows, labels, mask, *arguments, **groups)
    (0.0 * main).sum().backward()
    expected = rows.grad, model.output_layer.weight.grad.clone(), mtp.MTPLossLoggingHelper.tracker
    model.zero_grad()
    with unpatched():
        inputs = torch.cat(hidden).requires_grad_()
        first, *heads = inputs.chunk(1 + DEPTHS)
        actual = functional.mtp_loss(
            first,
            heads,
            labels,
            mask,
            model.output_layer,
            loss_type=loss_type,
            scaling_factor=model.config.mtp_loss_scaling_factor,
            measure=True,
            sequence_parallel=model.config.sequence_parallel,
            **groups,
        )
        actual.loss.backward()
    assert torch.equal(inputs.grad, expected[0]) and inputs.grad.any()
    assert torch.equal(model.output_layer.weight.grad, expected[1])
    sums = actual.metrics.sums()
    tokens = sums["tokens"].clone()
    torch.distributed.all_reduce(tokens, group=groups["cp_group"])
    logged = sums["losses"] * groups["cp_group"].size() / tokens
    torch.testing.assert_close(logged, expected[2]["loss_values"], rtol=1e-6, atol=0)
    assert torch.equal(sums["lengths"], expected[2]["length_values"])
