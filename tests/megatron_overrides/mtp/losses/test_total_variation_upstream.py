"""The cases that NVIDIA/Megatron-LM#6473 tests its end-to-end loss with, from full logits in plain torch.

Its cases on two ranks are in tests/multirank/mtp/test_losses.py. The rest of its cases tests its kernels.
"""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-for-acceptance")]

DEPTHS, HIDDEN = 2, 7


class Identity(torch.nn.Module):
    """An output layer whose logits are the hidden states."""

    gather_output = True

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(HIDDEN))

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return hidden @ (self.weight if weight is None else weight).T, None


@pytest.fixture
def run():
    """run(hidden, packed): backward through the heads' loss alone; the gradients of main model, heads and weight."""

    def run(hidden, packed=None):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            mtp_num_layers=DEPTHS,
            mtp_loss_type="e2e_tv",
            mtp_loss_scaling_factor=1.0,
            mtp_detach_heads=True,
        )
        length = hidden.size(0) // (1 + DEPTHS)
        hidden = hidden.clone().requires_grad_()
        output_layer = Identity()
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        main = process_mtp_loss(
            hidden_states=hidden,
            labels=torch.zeros(1, length, dtype=torch.long),
            loss_mask=torch.ones(1, length),
            output_layer=output_layer,
            output_weight=None,
            runtime_gather_output=True,
            is_training=False,
            compute_language_model_loss=lambda *_: pytest.fail("no cross entropy is asked for"),
            config=config,
            packed_seq_params=packed,
        )
        main.sum().backward()
        return *hidden.grad.chunk(1 + DEPTHS), output_layer.weight.grad

    return run


def test_targets_are_shifted_by_the_depth_and_only_the_heads_are_trained(run):
    torch.manual_seed(7)
    length = 6
    hidden = torch.randn((1 + DEPTHS) * length, 1, HIDDEN)
    main_grad, *head_grads, weight_grad = run(hidden)

    main, *heads = (part[:, 0] for part in hidden.chunk(1 + DEPTHS))
    heads = [head.clone().requires_grad_() for head in heads]
    complete = length - DEPTHS
    acceptances = [
        torch.minimum(main[depth : depth + complete].softmax(-1), head[:complete].softmax(-1)).sum(-1)
        for depth, head in enumerate(heads, start=1)
    ]
    (1 - torch.stack(acceptances).cumprod(0).mean(0)).mean().backward()
    assert torch.equal(main_grad, torch.ones_like(main_grad))
    assert weight_grad is None
    for actual, head in zip(head_grads, heads, strict=True):
        torch.testing.assert_close(actual[:, 0], head.grad, rtol=1e-5, atol=1e-7)


def test_chains_that_leave_their_packed_sequence_are_not_trained(run):
    torch.manual_seed(17)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    _, *head_grads, _ = run(torch.randn((1 + DEPTHS) * 7, 1, HIDDEN), packed)
    for actual in head_grads:
        assert actual.flatten(1).any(dim=1).tolist() == [True, False, False, True, True, False, False]
