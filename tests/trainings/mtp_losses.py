"""The losses of the heads as the patches compute them on this rank, and how far they are from the reference."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_token_prediction as mtp

from tests.oracles.losses.conditions import DEPTHS, LOSSES, Condition
from tests.oracles.losses.reference import Problem, answer, make_problem


class Difference(NamedTuple):
    """Norm of the difference over norm of the reference: of the loss, and of all its gradients on this rank."""

    loss: float
    gradient: float


def difference(condition: Condition, chunk_size: int = 9) -> Difference:
    """Compute the losses of `condition` and compare them; Megatron's process groups have the sizes of its layout."""
    layout = condition.layout
    batch_number = parallel_state.get_data_parallel_rank()
    problem = make_problem(condition, batch_number)
    slots = layout.pack.of_rank(
        list(range(layout.pack.size)), parallel_state.get_context_parallel_rank(), layout.context
    )
    right = answer(condition, problem)
    loss, heads, weight = compute(condition, problem, slots, chunk_size)
    for shared in (loss, weight):
        torch.distributed.all_reduce(shared, group=parallel_state.get_context_parallel_group())
    expected = right.heads[:, slots]
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if layout.sequence_parallel:
        expected = expected.chunk(layout.tensor, dim=1)[tp_rank]
    expected_weight = right.weight.chunk(layout.tensor)[tp_rank]
    actual, wanted = (
        torch.cat([one.flatten() for one in pair]) for pair in ((heads, weight), (expected, expected_weight))
    )
    return Difference(_relative(loss, right.loss), _relative(actual, wanted))


def _relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is wanted; where that is 0, infinity for anything else."""
    difference = (actual - wanted).norm()
    return (difference / wanted.norm()).item() if difference else 0.0


def compute(
    condition: Condition, problem: Problem, slots: list[int], chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of heads and output weight on this rank, in float64."""
    layout, dtype = condition.layout, getattr(torch, condition.dtype)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=problem.hidden.size(-1),
        num_attention_heads=2,
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=1.0,
        **LOSSES[condition.loss_type],
        mtp_detach_heads=condition.is_detached,
        mtp_depth_weights=problem.depth_weights,
        mtp_logits_chunk_size=chunk_size,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        context_parallel_size=layout.context,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    config.vocab_size = problem.tokens
    config.calculate_per_token_loss = condition.is_per_token
    output_layer = tensor_parallel.ColumnParallelLinear(
        config.hidden_size,
        problem.weight.size(0),
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=condition.is_tied,
    )
    shard = problem.weight.chunk(layout.tensor)[parallel_state.get_tensor_model_parallel_rank()].to(dtype)
    weight = torch.nn.Parameter(shard.clone()) if condition.is_tied else output_layer.weight
    with torch.no_grad():
        weight.copy_(shard)
    hidden = problem.hidden[:, slots].to(dtype)
    if layout.sequence_parallel:
        hidden = hidden.chunk(layout.tensor, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    hidden = hidden.flatten(0, 1).contiguous().requires_grad_()
    losses = []
    attach = mtp.MTPLossAutoScaler.apply

    def note(main: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        losses.append(loss.detach().double().sum())
        return attach(main, loss)

    mtp.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    with patch.object(mtp.MTPLossAutoScaler, "apply", note):
        main = mtp.process_mtp_loss(
            hidden,
            problem.labels[slots].T.contiguous(),
            problem.mask[slots].T.float().contiguous(),
            output_layer,
            weight if condition.is_tied else None,
            None,
            False,
            cross_entropy,
            config,
            cp_group=parallel_state.get_context_parallel_group(),
            packed_seq_params=layout.pack.params() if layout.is_packed else None,
            scale_logits_fn=lambda logits: logits * problem.logit_scale,
        )
    (0 * main).sum().backward()
    main_grad, *head_grads = hidden.grad.double().chunk(1 + DEPTHS)
    assert not main_grad.any(), "the losses of the heads train the main model's hidden states"
    weight_grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return sum(losses), torch.stack(head_grads), weight_grad.double()


def cross_entropy(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the loss [b, s] of labels [b, s] and logits [s, b, v], as LanguageModule does."""
    target = labels.transpose(0, 1).contiguous()
    return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), target).transpose(0, 1)
