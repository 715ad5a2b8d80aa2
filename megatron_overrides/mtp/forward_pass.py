"""Tell the MTP loss, which gets neither as an argument, the tokens of a forward pass and whether it trains anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from megatron_overrides.mtp.metrics.head_metrics import PassMetrics
from megatron_overrides.mtp.mtp_pass import requested


class ForwardPass(NamedTuple):
    """The forward pass of a model that is running.

    input_ids: the tokens that the main model sees.
    computes_loss: the losses of the heads are computed: there are gradients, modelopt observes the heads, or an
        `mtp_pass` says so.
    is_idle: the MTP block is skipped, so there are no hidden states of heads.
    metrics: what an `mtp_pass` measures without gradients; None leaves the metrics to Megatron's tracker.
    labels, loss_mask: what an `mtp_pass` gives to the heads, in place of what the model is given.
    process_groups: the ProcessGroupCollection of the model; None stands for Megatron's global groups.
    """

    input_ids: torch.Tensor | None = None
    computes_loss: bool = True
    is_idle: bool = False
    metrics: PassMetrics | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    process_groups: Any = None

    def targets(
        self, labels: torch.Tensor | None, loss_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return labels and mask of the heads, of which the model is given these.

        Raises:
            ValueError: what an `mtp_pass` gives has another shape than the tokens of this pass.
        """
        for name, given in (("labels", self.labels), ("loss_mask", self.loss_mask)):
            if given is not None and self.input_ids is not None and given.shape != self.input_ids.shape:
                raise ValueError(
                    f"mtp_pass({name}=...) has the shape {list(given.shape)}, the tokens of this forward pass have "
                    f"{list(self.input_ids.shape)}: open an mtp_pass for each microbatch"
                )
        return (
            labels if self.labels is None else self.labels,
            loss_mask if self.loss_mask is None else self.loss_mask,
        )


_NOT_RECORDED = ForwardPass()
_current: ContextVar[ForwardPass] = ContextVar("the forward pass of the model", default=_NOT_RECORDED)


def current() -> ForwardPass:
    """Return the forward pass that is running; a default ForwardPass if no model has recorded one.

    Raises:
        NotImplementedError: none has, and an `mtp_pass` asks for something: another library has replaced the model's
            method that records it, as verl and mcore-bridge do.
    """
    running = _current.get()
    if running is _NOT_RECORDED and requested() is not None:
        raise NotImplementedError(
            "mtp_pass has no effect on this model: another library has replaced the method of its class that records "
            "the forward pass (GPTModel._postprocess; verl and mcore-bridge do). Run the model without mtp_pass"
        )
    return running


def modelopt_observes(block: torch.nn.Module) -> bool:
    """Whether the block has quantizers or hooks of nvidia-modelopt.

    modelopt calibrates quantizers, ranks channels and runs a teacher without gradients. If the heads did not run, they
    would get no ranges, no ranks and no outputs.
    """
    return any(module.startswith("modelopt.") for module in _python_modules(block))


def megatron_fsdp_releases(block: torch.nn.Module) -> bool:
    """Whether Megatron-FSDP releases weights of the block after each forward of the layer that has them (ZeRO-3).

    It gathers them beforehand, while earlier layers run. If the heads did not run, the weights would stay allocated,
    and the heads would later run with them although the optimizer has stepped in between. The hooks of Megatron-FSDP
    tell; after 0.19 it has some under each sharding strategy, also where the block could be skipped.
    """
    return any("megatron_fsdp" in module.split(".") for module in _python_modules(block))


def _python_modules(block: torch.nn.Module) -> Iterator[str]:
    """The names of the Python modules that define the classes and the forward hooks of the block."""
    for module in block.modules():
        for part in (type(module), *module._forward_hooks.values()):
            yield getattr(part, "__module__", "")


@contextmanager
def running_pass(forward_pass: ForwardPass) -> Iterator[None]:
    token = _current.set(forward_pass)
    try:
        yield
    finally:
        _current.reset(token)
