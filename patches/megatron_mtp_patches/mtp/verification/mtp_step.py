"""A step in which only the MTP loss has a gradient, and what that gradient has reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled
from megatron_overrides.norms.optimizer_tree import check_optimizer, leaves
from megatron_overrides.norms.values import GradNorms
from megatron_overrides.scoped import scoped
from megatron_overrides.settings.checks import spell

from ...engine import PatchError
from ...engine.call import Call
from .traces import without_traces


class Positions(NamedTuple):
    """The positions of the MTP losses that count, and all positions; `is_masked`: there was a loss mask."""

    counted: int
    total: int
    is_masked: bool


class MTPStep:
    """A step on this rank: the positions of each MTP loss, and whether a main loss was silenced."""

    def __init__(self) -> None:
        self.positions: list[Positions] = []
        self.has_silenced = False


class Verification(NamedTuple):
    """The parameters that the MTP loss has reached, the same on every rank; str() describes them.

    Attributes:
        heads: the names of the parameters of MTP heads that got a gradient, on any rank.
        others: those of other parameters that did.
        positions: how many positions counted in each MTP loss, on all ranks.
        has_silenced: a main loss was computed in Megatron's schedules, without a gradient.
        norms: the gradient norms of that step by group, the main one under None: of detached heads, 0 for the main
            group and not 0 for "mtp". Empty with a loss scaler (fp16), which counts the steps that it sees.
    """

    heads: tuple[str, ...]
    others: tuple[str, ...]
    positions: tuple[Positions, ...]
    has_silenced: bool
    norms: dict[str | None, float]

    @property
    def ok(self) -> bool:
        """True if the MTP loss has trained heads and nothing else."""
        return bool(self.heads) and not self.others

    @property
    def sentences(self) -> list[str]:
        """On the parameters and, if there were MTP losses, on their positions."""
        return [_describe_reached(self), *([_share(self.positions)] if self.positions else [])]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


_mtp_step: ContextVar[MTPStep] = ContextVar("mtp_step")


def only_mtp_loss() -> AbstractContextManager[MTPStep]:
    """Within, the main loss has no gradient in Megatron's schedules, and the positions of the MTP losses are noted."""
    return scoped(_mtp_step, MTPStep())


def silence_main_loss(call: Call) -> Any:
    """Wraps forward_step_calc_loss: inside `only_mtp_loss` the main and the auxiliary losses get a weight of zero."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    step = _mtp_step.get(None)
    if step is None:
        return call.proceed()
    step.has_silenced = True
    loss_func = call["loss_func"]

    def silent(*loss_args: Any, **loss_kwargs: Any) -> Any:
        loss, *rest = loss_func(*loss_args, **loss_kwargs)
        return (0.0 * loss, *rest)

    call["loss_func"] = silent
    result = call.proceed()
    MoEAuxLossAutoScaler.set_loss_scale(torch.zeros(1, device="cuda"))
    return result


def count_positions(call: Call) -> Any:
    """Wraps process_mtp_loss: notes how many positions its loss mask counts."""
    mask = call.get("loss_mask")
    step = _mtp_step.get(None)
    if step is not None:
        counted = Positions(0, 0, False) if mask is None else Positions(int(mask.sum()), mask.numel(), True)
        step.positions.append(counted)
    return call.proceed()


def run(chunks: Sequence[torch.nn.Module], optimizer: Any, forward_backward: Callable[[], Any]) -> Verification:
    """Run a step without an update; see `megatron_mtp_patches.verify`. Gradients are zero after it."""
    check_optimizer(optimizer)
    if any(are_heads_disabled(getattr(chunk, "config", None)) for chunk in chunks):
        raise PatchError(f"verify: {spell('disable_mtp_loss')} leaves the MTP loss out, so it trains nothing")
    if not callable(forward_backward):
        raise TypeError("verify: give a function that runs a step, as in `lambda: step(batch)`, not what it returns")
    _zero(chunks, optimizer)
    try:
        with without_traces(chunks), _without_update(optimizer), only_mtp_loss() as step:
            forward_backward()
        return gather(chunks, step)._replace(norms=_norms(optimizer))
    finally:
        _zero(chunks, optimizer)


@contextmanager
def _without_update(optimizer: Any) -> Iterator[None]:
    """Within, `optimizer.step` raises a PatchError before it changes anything."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PatchError("verify: the step updates the parameters; give a function that runs forward and backward only")

    own = vars(optimizer).get("step")  # of this object, where another library has given it one
    optimizer.step = refuse
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own


def gather(chunks: Sequence[torch.nn.Module], step: MTPStep) -> Verification:
    """Look for gradients in the parameters. A collective of all ranks."""
    reached: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in chunks:
        for name, param, is_head in _parameters(chunk):
            gradient = getattr(param, "main_grad", None)
            gradient = param.grad if gradient is None else gradient
            if gradient is not None and getattr(gradient, "_local_tensor", gradient).any():
                reached[is_head].add(name)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (reached, step.positions, step.has_silenced))
    heads, others = (tuple(sorted(set().union(*(one[0][is_head] for one in everyone)))) for is_head in (True, False))
    positions = tuple(one for _, rank_positions, _ in everyone for one in rank_positions)
    return Verification(heads, others, positions, any(one[2] for one in everyone), {})


def _norms(optimizer: Any) -> dict[str | None, float]:
    from megatron_overrides.norms.measuring import measure

    if any(getattr(leaf, "grad_scaler", None) is not None for leaf in leaves(optimizer)):
        return {}
    optimizer.prepare_grads()
    norms: GradNorms = measure(optimizer)
    return {group: float(norm) for group, norm in norms.total.items()}


def _zero(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
    optimizer.zero_grad()


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    from megatron_overrides.mtp.blocks import mtp_blocks

    heads = {id(param) for block in mtp_blocks([chunk]) for param in block.parameters()}
    for name, param in chunk.named_parameters():
        yield name.replace("module.", ""), param, id(param) in heads


def _share(positions: Sequence[Positions]) -> str:
    if not all(one.is_masked for one in positions):
        return "the model gets no loss_mask, so the MTP loss counts every position, padding included"
    counted, total = (sum(one[number] for one in positions) for number in (0, 1))
    return f"the loss mask counts {counted:,} of {total:,} positions ({100.0 * counted / max(total, 1):.1f} %)"


def _describe_reached(verification: Verification) -> str:
    heads, others = verification.heads, verification.others
    if not heads and not others:
        return (
            "the MTP loss has reached no parameter at all. Does the model have MTP heads (--mtp-num-layers) and a loss "
            "mask, and did a forward and backward pass run?"
        )
    if not others:
        return f"the MTP loss has reached {len(heads)} parameters of the heads and nothing else"
    names = "".join(f"    {name}\n" for name in others)
    way_out = (
        "--mtp-detach-heads keeps it out of them."
        if verification.has_silenced
        else "No step of Megatron's schedules was seen, so the main loss could also have a gradient. Run the step "
        "through get_forward_backward_func(), or leave the main loss out of it."
    )
    return f"the MTP loss has reached {len(heads)} parameters of the heads and {len(others)} others:\n{names}{way_out}"
