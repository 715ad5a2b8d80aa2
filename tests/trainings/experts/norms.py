"""The norms of one step: as Megatron reports them, and of all gradients, gathered by hand."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron_mtp_patches.defects.labs import lab

from tests.trainings.experts.conditions import Condition, Layout
from tests.trainings.experts.model import backward, make_model

_SHARDED = re.compile(r"word_embeddings|output_layer|linear_qkv\.(weight|bias)|linear_proj\.weight|eh_proj\.weight")
_SHARDED_EXPERT = re.compile(r"linear_fc1\.|linear_fc2\.weight")


class Norms(NamedTuple):
    """What describes the gradients of a step, and the parameters before it; None where nothing measures it.

    Attributes:
        main: the norm of the gradients of the main group.
        mtp: that of the MTP head; None if it has no separate norm.
        zeros: how many gradients are zero.
        parameters: the norm of the parameters.
    """

    main: float
    mtp: float | None
    zeros: int
    parameters: float | None


def by_hand(condition: Condition) -> Norms:
    """The norms of all gradients and parameters, each counted once.

    What is a shard and what a replica is known from the name of a parameter and the rank's place in the layout; no
    attribute of a parameter is read. The gradients are reduced over all data-parallel ranks, so each rank has them
    whole, whichever optimizer uses them.
    """
    main, mtp, zeros, parameters = _gather(condition.layout, condition.has_bias)
    if not condition.clips_mtp:
        return Norms((main + mtp) ** 0.5, None, int(zeros), parameters**0.5)
    return Norms(main**0.5, mtp**0.5, int(zeros), parameters**0.5)


@functools.cache
def _gather(layout: Layout, has_bias: bool) -> tuple[float, ...]:
    """Squared norms of the gradients of the main model and of the MTP head; zeros; squared norm of the parameters."""
    model = make_model(layout, has_bias, distributed_optimizer=False)
    backward(model)
    sums = torch.zeros(4, dtype=torch.float64)
    for name, param in _distinct(model):
        grad = param.main_grad.double()
        sums[int(name.startswith("mtp."))] += grad.square().sum()
        sums[2] += (grad == 0).sum()
        sums[3] += param.detach().double().square().sum()
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def reported(condition: Condition) -> Norms:
    """What the step of the optimizer reports, and Megatron's parameter norm where its trainer is installed."""
    model = make_model(condition.layout, condition.has_bias, condition.optimizer == "distributed optimizer")
    if condition.clips_mtp:
        for name, param in model.module.named_parameters():
            if "mtp.layers" in name:
                param.grad_norm_group = "mtp"
    optimizer = make_optimizer(condition.optimizer, model)
    backward(model)
    parameters = _parameter_norm(model)
    updated, norm, zeros = optimizer.step()
    assert updated
    by_group = getattr(optimizer, "grad_norms_by_group", {})
    mtp = float(by_group["mtp"]) if condition.clips_mtp and by_group else None
    return Norms(float(norm), mtp, int(zeros), parameters)


def make_optimizer(kind: str, model: Any) -> Any:
    """The optimizer of this name (see OPTIMIZERS) of a model in DDP."""
    is_distributed = kind == "distributed optimizer"
    return lab.make_optimizer(
        model,
        optimizer="adam" if is_distributed else kind,
        bf16=True,
        clip_grad=1.0,
        log_num_zeros_in_grad=True,
        use_distributed_optimizer=is_distributed,
    )


def _distinct(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters, with their names, of which this rank has the only copy or the first one."""
    from megatron.core import parallel_state

    for name, param in model.module.named_parameters():
        name = re.sub(r"^(module\.)+", "", name)
        if ".experts." in name:
            replica = parallel_state.get_expert_data_parallel_rank()
            shard = parallel_state.get_expert_tensor_parallel_rank()
            is_sharded = _SHARDED_EXPERT.search(name)
        else:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            shard = parallel_state.get_tensor_model_parallel_rank()
            is_sharded = _SHARDED.search(name)
        if replica == 0 and (is_sharded or shard == 0):
            yield name, param


def _parameter_norm(model: Any) -> float | None:
    try:
        from megatron.training import global_vars, utils
    except ImportError:  # the wheel of 0.16.1 has no trainer
        return None
    global_vars.set_args(SimpleNamespace(bf16=True, use_megatron_fsdp=False))
    return float(utils.calc_params_l2_norm([model]))
