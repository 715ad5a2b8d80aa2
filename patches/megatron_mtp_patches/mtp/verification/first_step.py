"""`verify-mtp`: verify the first training step of a script, print what the MTP loss has reached, and end the process.

Where `freeze_base_model_for_mtp` trains the heads alone, steps are made until one has changed the heads. The bits of
the main model are compared after the next forward pass, which gathers what the update has not gathered.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch

from ...engine.call import Call
from .mtp_step import MTPStep, gather, only_mtp_loss


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


def report_after_schedule(call: Call) -> Any:
    """Wraps get_forward_backward_func: reports the gradients after a schedule with a backward pass."""
    run = call.proceed()

    @functools.wraps(run)
    def run_and_report(*schedule_args: Any, **schedule_kwargs: Any) -> Any:
        arguments = inspect.signature(run).bind(*schedule_args, **schedule_kwargs).arguments
        if arguments.get("forward_only", False):
            return run(*schedule_args, **schedule_kwargs)
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        compares = bool(_before)
        if not compares and _is_frozen(chunks):
            _before.append(_copy(chunks))
        with only_mtp_loss() as step:
            result = run(*schedule_args, **schedule_kwargs)
        if not _before or (compares and _on_any_rank(_changed(_before[0].heads, _copy(chunks).heads))):
            _report(chunks, step)
        return result

    return run_and_report


def _report(chunks: list[torch.nn.Module], step: MTPStep) -> None:
    """Print what has a gradient; exit with 0 on every rank if that is heads alone, and only heads have changed."""
    evidence = gather(chunks, step)
    after = _copy(chunks).main_model if _before else {}
    changed = _changed(_before[0].main_model, after) if _before else set()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (changed, len(after)))
    all_changed = sorted(set().union(*(one[0] for one in everyone)))
    if torch.distributed.get_rank() == 0:
        for sentence in evidence.sentences:
            print(f"verify-mtp: {sentence}", file=sys.stderr, flush=True)
        if compared := sum(one[1] for one in everyone):
            print(f"verify-mtp: {_describe_bits(all_changed, compared)}", file=sys.stderr, flush=True)
    torch.distributed.barrier()
    raise VerificationExit(0 if evidence.ok and not all_changed else 1)


def _is_frozen(chunks: list[torch.nn.Module]) -> bool:
    from megatron.core.utils import get_model_config

    return bool(getattr(get_model_config(chunks[0]), "freeze_base_model_for_mtp", False))


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


def _on_any_rank(names: set[str]) -> bool:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, bool(names))
    return any(everyone)


def _copy(chunks: list[torch.nn.Module]) -> Tensors:
    """Copy this rank's parameters and persistent buffers to the CPU; of a DTensor its local part."""
    from megatron_overrides.mtp.blocks import mtp_blocks

    copies = Tensors({}, {})
    for place, chunk in enumerate(chunks):
        heads = {module for block in mtp_blocks([chunk]) for module in block.modules()}
        for path, module in chunk.named_modules():
            part = copies.heads if module in heads else copies.main_model
            buffers = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
            for name, tensor in (*module._parameters.items(), *((name, module._buffers[name]) for name in buffers)):
                if tensor is not None:
                    local = getattr(tensor, "_local_tensor", tensor).detach()
                    part[f"{place}.{path}.{name}"] = local.to("cpu", copy=True)
    return copies


def _describe_bits(changed: list[str], compared: int) -> str:
    if not changed:
        return f"an update of the heads has left {compared} tensors of the main model as they were, to the bit"
    names = "\n    ".join(changed)
    return f"an update of the heads has changed {len(changed)} tensors of the main model:\n    {names}"
