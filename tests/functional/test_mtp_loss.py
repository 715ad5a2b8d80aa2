"""mtp_loss, roll and acceptance without the patches give the bits of the patched Megatron."""

from itertools import product

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp
from megatron_mtp_patches import functional

from tests.oracles.losses.conditions import LOSSES

from .conftest import BATCH, LENGTH, VOCABULARY

pytestmark = pytest.mark.forked("patched")
DEPTHS = 2


@pytest.fixture
def rows(batch):
    """Hidden states of the main model and of the heads, labels and loss mask."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(9)
    hidden = torch.randn((1 + DEPTHS) * LENGTH, BATCH, 16, generator=generator)
    tokens, _, _, mask = batch
    return hidden, tokens, mask


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def by_patches(model, weight, hidden, labels, mask):
    """Run the loss of the patched Megatron; returns (gradient of the hidden states, of the weight, the tracker)."""
    mtp.MTPLossLoggingHelper.tracker = {}
    mtp.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    inputs = leaf(hidden)
    model.zero_grad()
    output = (model.output_layer, weight if model.share_embeddings_and_output_weights else None, None)
    main = mtp.process_mtp_loss(inputs, labels, mask, *output, True, model.compute_language_model_loss, model.config)
    (0.0 * main).sum().backward()
    return inputs.grad, weight.grad, mtp.MTPLossLoggingHelper.tracker


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_has_the_bits_of_the_patches(make_gpt, unpatched, rows, loss):
    hidden, labels, mask = rows
    cases = []
    for tied, detach, chunk_size in product([False, True], [False, True], [0, 5]):
        settings = {**LOSSES[loss], "mtp_detach_heads": detach, "mtp_logits_chunk_size": chunk_size}
        settings |= {"mtp_depth_weights": "1,3", "mtp_acceptance_length_interval": 1}
        model = make_gpt(VOCABULARY, LENGTH, tied, **settings)
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        patched = by_patches(model, weight, hidden, labels, mask)
        weight.grad = None
        cases.append((model, weight, patched))
    with unpatched():
        for case in cases:
            compare_with_patches(*case, rows, loss)


def compare_with_patches(model, weight, patched, rows, loss):
    """The function gives the bits of `patched`: (gradient of the hidden states, of the weight, the tracker)."""
    (hidden_gradient, weight_gradient, tracker), config = patched, model.config
    hidden, labels, mask = rows
    hidden = leaf(hidden)
    main, *heads = hidden.chunk(1 + DEPTHS)
    result = functional.mtp_loss(
        main,
        heads,
        labels,
        mask,
        model.output_layer,
        **{name.removeprefix("mtp_"): value for name, value in LOSSES[loss].items()},
        depth_weights=[1, 3],
        scaling_factor=config.mtp_loss_scaling_factor,
        chunk_size=config.mtp_logits_chunk_size,
        measure=True,
        detach_output_layer=config.mtp_detach_heads,
        output_weight=weight if model.share_embeddings_and_output_weights else None,
    )
    result.loss.backward()
    assert torch.equal(hidden.grad, hidden_gradient) and hidden.grad[LENGTH:].any() and not hidden.grad[:LENGTH].any()
    if config.mtp_detach_heads:
        assert weight.grad is None
    else:
        assert torch.equal(weight.grad, weight_gradient)
    sums = result.metrics.sums()
    assert torch.equal(sums["losses"] / sums["tokens"], tracker["loss_values"])
    assert torch.equal(sums["counts"], torch.stack([tracker["correct_values"], tracker["total_values"]]))
    assert torch.equal(sums["lengths"], tracker["length_values"])
    means = result.means()
    assert set(means) == {
        *(f"mtp_{depth} {kind}" for depth in (1, 2) for kind in ("loss", "acceptance %")),
        "mtp acceptance length",
        "mtp greedy acceptance length",
    }
    assert means["mtp_1 loss"] == pytest.approx(tracker["loss_values"][0].item())


def test_nothing_is_measured_unless_it_is_asked_for(make_gpt, rows):
    model = make_gpt(VOCABULARY, LENGTH)
    hidden, labels, mask = rows
    main, *heads = hidden.chunk(1 + DEPTHS)
    actual = functional.mtp_loss(main, heads, labels, mask, model.output_layer)
    assert list(actual.means()) == ["mtp_1 loss", "mtp_2 loss"]


def test_labels_from_tokens_are_those_of_the_patches(rows, unpatched):
    _, tokens, mask = rows
    rolled = [mtp.roll_tensor(each, shifts=-1, dims=-1)[0] for each in (tokens, mask)]
    with unpatched():
        assert all(map(torch.equal, map(functional.roll, (tokens, mask)), rolled))
        assert not torch.equal(rolled[0], tokens)


@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_roll_as_with_the_patches(unpatched, padded):
    tokens = torch.arange(1, 17).view(1, -1)
    bounds = torch.tensor([0, 5, 9, 16] if not padded else [0, 4, 7, 12], dtype=torch.int32)
    slots = torch.tensor([0, 5, 9, 16], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=slots if padded else None
    )
    expected = mtp.roll_tensor(tokens, shifts=-1, dims=-1, packed_seq_params=packed)[0]
    with unpatched():
        actual = functional.roll(tokens, packed)
    assert torch.equal(actual, expected)
    last = [4, 8, 15] if not padded else [3, 7, 13]
    assert not actual[0, last].any() and actual[0, 0] == 2


def test_slots_after_the_last_packed_sequence_are_0_and_missing_ones_an_error():
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    rolled = functional.roll(torch.arange(1, 13).view(1, -1), packed)
    assert rolled.tolist() == [[2, 3, 0, 5, 6, 7, 8, 0, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="have 8 slots on this rank, and the tensor 5"):
        functional.roll(torch.arange(5).view(1, -1), packed)


def test_acceptance_counts_as_the_patches_do(rows, unpatched):
    _, labels, mask = rows
    logits = torch.randn(LENGTH, BATCH, VOCABULARY)
    logits.scatter_(2, labels.t().unsqueeze(-1)[: LENGTH // 2], 100.0)
    expected = mtp._compute_mtp_acceptance_counts(logits, labels, mask, None, True)
    with unpatched():
        correct, total = functional.acceptance(logits, labels, mask)
    assert (correct, total) == expected and 0 < correct < total == mask.sum()


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"head_hiddens": []}, "head_hiddens is empty"),
        ({"head_hiddens": [None]}, "head_hiddens has None; give the hidden states"),
        ({"main_hidden": None}, "main_hidden is None; give the hidden states"),
        ({"main_hidden": torch.zeros(LENGTH, 16)}, "main_hidden is of the shape .*; give the hidden states"),
        ({"head_hiddens": [torch.zeros(3, BATCH, 16)]}, "hidden states of head 1 have the shape"),
        ({"labels": torch.zeros(BATCH + 1, LENGTH, dtype=torch.long)}, "labels has the shape"),
        ({"loss_mask": torch.ones(BATCH, LENGTH - 1)}, "loss_mask has the shape"),
        (
            {"labels": torch.zeros(BATCH, LENGTH + 1, dtype=torch.long), "loss_mask": torch.ones(BATCH, LENGTH + 1)},
            "labels has the shape",
        ),
        ({"loss_mask": None}, "loss_mask is None; give a tensor"),
        ({"labels": torch.ones(BATCH, LENGTH)}, "labels have the dtype torch.float32"),
        ({"detach_output_layer": True, "output_layer": print}, "is a torch.nn.Module"),
        ({"loss_type": "rkl"}, "must be one of cross_entropy, kl, tv, lk, e2e_tv, not 'rkl'"),
        ({"position_weights": "dpace", "loss_type": "tv"}, "weighs cross entropy, but .* is tv"),
        ({"position_weights": "dpace", "dpace_alpha": 0}, "alpha. 0: give a number above 0, up to 1"),
        ({"depth_weights": [1.0]}, "one weight for each of the 2 MTP layers"),
        ({"chunk_size": -1}, "give a number of rows"),
        ({"vocab_size": 0}, "vocab_size is 0; give the number of tokens"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": True}, "vocab_size is True"),
    ],
)
def test_what_cannot_be_computed_is_an_error(rows, change, problem):
    hidden, labels, mask = rows
    main, *heads = hidden.chunk(1 + DEPTHS)
    inputs = {"main_hidden": main, "head_hiddens": heads, "labels": labels, "loss_mask": mask, "output_layer": None}
    with pytest.raises(ValueError, match=problem):
        functional.mtp_loss(**{**inputs, **change})


@pytest.mark.parametrize("tensor", [[1], None, torch.tensor(1)], ids=str)
def test_what_cannot_be_rolled_is_an_error(tensor):
    with pytest.raises(TypeError, match=r"roll takes a tensor \[\.\.\., s\] of tokens"):
        functional.roll(tensor)


@pytest.mark.parametrize("change", ["logits", "labels", "loss_mask"])
def test_other_shapes_of_an_acceptance_are_an_error(change):
    inputs = {"logits": torch.zeros(4, 2, 8), "labels": torch.zeros(2, 4).long(), "loss_mask": torch.ones(2, 4)}
    assert functional.acceptance(**inputs)[1] == 8
    for wrong in (inputs[change].transpose(0, 1), [1], None):
        with pytest.raises(ValueError, match=r"takes logits \[s, b, v\], labels \[b, s\] and loss_mask \[b, s\], not "):
            functional.acceptance(**{**inputs, change: wrong})


def test_an_output_layer_of_torch_is_an_error(rows):
    hidden, labels, mask = rows
    main, *heads = hidden.chunk(1 + DEPTHS)
    with pytest.raises(TypeError, match="but Linear does not take that.* Wrap it in a module that does"):
        functional.mtp_loss(main, heads, labels, mask, torch.nn.Linear(16, VOCABULARY))


def test_names_of_heads_are_told_from_others():
    heads = ("mtp.layers.0.eh_proj.weight", "module.module.mtp.layers.1.enorm.weight", "mtp.final_layernorm.bias")
    others = ("decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight", "decoder.mtp")
    assert all(map(functional.is_mtp_parameter, heads)) and not any(map(functional.is_mtp_parameter, others))


def test_nothing_of_torch_or_megatron_is_imported_with_the_module():
    import subprocess
    import sys

    code = (
        "import sys; from megatron_mtp_patches import functional;"
        "heavy = ('torch', 'megatron.', 'megatron_overrides.');"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
