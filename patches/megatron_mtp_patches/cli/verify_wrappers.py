"""Verify the first training step: only the MTP loss has a gradient, and the parameters that got one are reported.

Where `freeze_base_model_for_mtp` trains the heads alone, steps are made until one has changed the heads. The bits of
the main model are compared after the next forward pass, which gathers what the update has left to be gathered.

The idea is slime's check for "only .mtp. gradients" (THUDM/slime), for any script that trains with Megatron's
schedules.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class Positions(NamedTuple):
    """How many positions of the MTP losses count, and how many there are; `masked`: there was a loss mask."""

    counted: int
    total: int
    masked: bool


_seen: ContextVar[list[Positions]] = ContextVar("what the MTP losses of the step have counted")


class Tensors(NamedTuple):
    """The main model and the heads of this rank, on the CPU."""

    main_model: dict[str, torch.Tensor]
    heads: dict[str, torch.Tensor]


# Before the first update, where only the heads train; empty elsewhere.
_before: list[Tensors] = []


class VerificationExit(SystemExit):
    """Raised once the first step has been checked, with exit code 0 or 1.

    Any other SystemExit means that the script stopped before that step.
    """


def silence_main_loss(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps forward_step_calc_loss: the main loss and the auxiliary losses of routers get a weight of zero."""
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


def report_after_schedule(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps get_forward_backward_func: reports the gradients after a schedule with a backward pass."""
    run = wrapped(*args, **kwargs)

    @functools.wraps(run)
    def run_and_report(*schedule_args: Any, **schedule_kwargs: Any) -> Any:
        given = inspect.signature(run).bind(*schedule_args, **schedule_kwargs).arguments
        if given.get("forward_only", False):
            return run(*schedule_args, **schedule_kwargs)
        model = given["model"]
        chunks = model if isinstance(model, list) else [model]
        compares = bool(_before)
        if not compares and _is_frozen(chunks):
            _before.append(_copy(chunks))
        seen: list[Positions] = []
        token = _seen.set(seen)
        try:
            result = run(*schedule_args, **schedule_kwargs)
        finally:
            _seen.reset(token)
        if not _before or (compares and _on_any_rank(_changed(_before[0].heads, _copy(chunks).heads))):
            _report(chunks, seen)
        return result

    return run_and_report


def count_positions(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps process_mtp_loss: notes how many positions its loss mask counts."""
    mask = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("loss_mask")
    seen = _seen.get(None)
    if seen is not None:
        seen.append(Positions(0, 0, False) if mask is None else Positions(int(mask.sum()), mask.numel(), True))
    return wrapped(*args, **kwargs)


def _report(chunks: list[torch.nn.Module], seen: list[Positions]) -> None:
    """Print which parameters have a gradient; exit with 0 on every rank if all of them belong to MTP heads."""
    reached: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in chunks:
        for name, param, is_head in _parameters(chunk):
            gradient = getattr(param, "main_grad", None)
            gradient = param.grad if gradient is None else gradient
            if gradient is not None and getattr(gradient, "_local_tensor", gradient).any():
                reached[is_head].add(name)
    after = _copy(chunks).main_model if _before else {}
    changed = _changed(_before[0].main_model, after) if _before else set()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (reached, seen, changed, len(after)))
    heads, others = (sorted(set().union(*(one[0][is_head] for one in everyone))) for is_head in (True, False))
    all_changed = sorted(set().union(*(one[2] for one in everyone)))
    if torch.distributed.get_rank() == 0:
        print(f"verify-mtp: {_in_words(heads, others)}", file=sys.stderr, flush=True)
        if positions := [one for _, of_rank, _, _ in everyone for one in of_rank]:
            print(f"verify-mtp: {_share(positions)}", file=sys.stderr, flush=True)
        if compared := sum(one[3] for one in everyone):
            print(f"verify-mtp: {_bits_in_words(all_changed, compared)}", file=sys.stderr, flush=True)
    torch.distributed.barrier()
    raise VerificationExit(1 if others or all_changed or not heads else 0)


def _is_frozen(chunks: list[torch.nn.Module]) -> bool:
    from megatron.core.utils import get_model_config

    return bool(getattr(get_model_config(chunks[0]), "freeze_base_model_for_mtp", False))


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


def _on_any_rank(found: set[str]) -> bool:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, bool(found))
    return any(everyone)


def _copy(chunks: list[torch.nn.Module]) -> Tensors:
    """Copy this rank's parameters and persistent buffers to the CPU; of a DTensor its local part."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    found = Tensors({}, {})
    for place, chunk in enumerate(chunks):
        blocks = (module for module in chunk.modules() if isinstance(module, MultiTokenPredictionBlock))
        heads = {module for block in blocks for module in block.modules()}
        for path, module in chunk.named_modules():
            part = found.heads if module in heads else found.main_model
            buffers = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
            for name, tensor in (*module._parameters.items(), *((name, module._buffers[name]) for name in buffers)):
                if tensor is not None:
                    local = getattr(tensor, "_local_tensor", tensor).detach()
                    part[f"{place}.{path}.{name}"] = local.to("cpu", copy=True)
    return found


def _bits_in_words(changed: list[str], compared: int) -> str:
    if not changed:
        return f"an update of the heads has left {compared} tensors of the main model as they were, to the bit"
    names = "\n    ".join(changed)
    return f"an update of the heads has changed {len(changed)} tensors of the main model:\n    {names}"


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    blocks = (module for module in chunk.modules() if isinstance(module, MultiTokenPredictionBlock))
    heads = {id(param) for block in blocks for param in block.parameters()}
    for name, param in chunk.named_parameters():
        yield name.replace("module.", ""), param, id(param) in heads


def _share(positions: list[Positions]) -> str:
    if not all(one.masked for one in positions):
        return "the model gets no loss_mask, so the MTP loss counts every position, padding included"
    counted, total = (sum(one[number] for one in positions) for number in (0, 1))
    return f"the loss mask counts {counted:,} of {total:,} positions ({100.0 * counted / max(total, 1):.1f} %)"


def _in_words(heads: list[str], others: list[str]) -> str:
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
