"""One training step in which only the MTP loss has a gradient, and a look at which parameters got one.

The idea is slime's probe of "only .mtp. gradients" (THUDM/slime), here for any script that trains with Megatron's
schedules.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch


def silence_main_loss(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps forward_step_calc_loss: the loss of the trunk, and those of expert routers, get a weight of zero."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    loss_func = call.arguments["loss_func"]

    def silent(*loss_args: Any, **loss_kwargs: Any) -> Any:
        loss, *rest = loss_func(*loss_args, **loss_kwargs)
        return (0.0 * loss, *rest)

    call.arguments["loss_func"] = silent
    result = wrapped(*call.args, **call.kwargs)
    MoEAuxLossAutoScaler.set_loss_scale(torch.zeros(1, device="cuda"))
    return result


def report_gradients(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> None:
    """Wraps finalize_model_grads(model chunks, ...), after which the gradients are complete: report them and exit.

    Raises:
        SystemExit: 0 on every rank if the MTP loss has reached heads and nothing else, otherwise 1.
    """
    wrapped(*args, **kwargs)
    reached: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in inspect.signature(wrapped).bind(*args, **kwargs).arguments["model"]:
        for name, param, is_head in _parameters(chunk):
            gradient = getattr(param, "main_grad", None)
            gradient = param.grad if gradient is None else gradient
            if gradient is not None and getattr(gradient, "_local_tensor", gradient).any():
                reached[is_head].add(name)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, reached)
    heads, others = (sorted(set().union(*(one[is_head] for one in everyone))) for is_head in (True, False))
    if torch.distributed.get_rank() == 0:
        print(f"verify-mtp: {_verdict(heads, others)}", file=sys.stderr, flush=True)
    torch.distributed.barrier()
    sys.exit(1 if others or not heads else 0)


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    blocks = (module for module in chunk.modules() if isinstance(module, MultiTokenPredictionBlock))
    heads = {id(param) for block in blocks for param in block.parameters()}
    for name, param in chunk.named_parameters():
        yield name.replace("module.", ""), param, id(param) in heads


def _verdict(heads: list[str], others: list[str]) -> str:
    if not heads and not others:
        return (
            "the MTP loss has reached no parameter at all. Has the model MTP heads (--mtp-num-layers), and a loss mask?"
        )
    if not others:
        return f"the MTP loss has reached {len(heads)} parameters of the heads and nothing else"
    names = "\n    ".join(others)
    return (
        f"the MTP loss has reached {len(heads)} parameters of the heads and {len(others)} others:\n    {names}\n"
        f"--mtp-detach-heads keeps it out of them."
    )
