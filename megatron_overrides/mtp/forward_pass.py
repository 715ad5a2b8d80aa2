"""The state of the running forward pass, one object in one context variable, and the wrappers that record and use it.

The functions that need it (the MTP block, the loss of the heads) get none of it as an argument. This module imports
nothing of Megatron, because wrappers import it while modules of Megatron are being imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled
from megatron_overrides.scoped import scoped

if TYPE_CHECKING:
    from megatron_overrides.mtp.metrics.head_metrics import PassMetrics


class Request(NamedTuple):
    """The caller's requests to the heads in some forward passes; see `megatron_mtp_patches.mtp_pass`."""

    compute: bool
    metrics: PassMetrics
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None


mtp_pass_request: ContextVar[Request | None] = ContextVar("mtp_pass_request", default=None)


@contextmanager
def mtp_pass(
    compute: bool, labels: torch.Tensor | None = None, loss_mask: torch.Tensor | None = None
) -> Iterator[PassMetrics]:
    """Run the heads and their losses in the forward passes inside, or do not: `megatron_mtp_patches.mtp_pass`."""
    from megatron_overrides.mtp.metrics.head_metrics import PassMetrics

    metrics = PassMetrics()
    with scoped(mtp_pass_request, Request(compute, metrics, labels, loss_mask)):
        yield metrics


class ForwardPass(NamedTuple):
    """The forward pass of a model. The wrappers around it add what they know (`running_pass`).

    record_forward_inputs adds:
        is_recorded: this wrapper has run.
        input_ids: the tokens that the main model sees.
        computes_loss: the losses of the heads are computed: there are gradients, modelopt observes the heads, or an
            `mtp_pass` asks for it.
        is_idle: the output of the MTP block, if this stage has one, is that of the main model alone.
        request: that of an `mtp_pass`. Its labels and its mask are those of the heads.
        metrics: what an `mtp_pass` measures without gradients; None leaves the metrics to Megatron's tracker.

    run_main_model_without_gradients adds:
        head_losses: the losses that the output of the model is to train, because the main model is frozen.
    """

    is_recorded: bool = False
    input_ids: torch.Tensor | None = None
    computes_loss: bool = True
    is_idle: bool = False
    request: Request | None = None
    metrics: PassMetrics | None = None
    head_losses: list[torch.Tensor] | None = None

    @property
    def trains_heads(self) -> bool:
        """True if there are gradients. A frozen main model runs without them also where its heads train."""
        return torch.is_grad_enabled() or self.head_losses is not None

    def targets(
        self, labels: torch.Tensor | None, loss_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return labels and mask of the heads, of which the model is given these.

        Raises:
            ValueError: what an `mtp_pass` gives has another shape than the tokens of this pass.
        """
        if self.request is None:
            return labels, loss_mask
        for name in ("labels", "loss_mask"):
            tensor = getattr(self.request, name)
            if tensor is not None and self.input_ids is not None and tensor.shape != self.input_ids.shape:
                raise ValueError(
                    f"mtp_pass({name}=...) has the shape {list(tensor.shape)}, the tokens of this forward pass have "
                    f"{list(self.input_ids.shape)}: open an mtp_pass for each microbatch"
                )
        return (
            labels if self.request.labels is None else self.request.labels,
            loss_mask if self.request.loss_mask is None else self.request.loss_mask,
        )


_NOTHING_KNOWN = ForwardPass()
_forward_pass: ContextVar[ForwardPass] = ContextVar("forward_pass", default=_NOTHING_KNOWN)


def current() -> ForwardPass:
    """Return the forward pass that is running; a default ForwardPass if no wrapper has added anything."""
    return _forward_pass.get()


def running_pass(**facts: Any) -> AbstractContextManager[ForwardPass]:
    """Give the running forward pass these fields as well."""
    return scoped(_forward_pass, current()._replace(**facts))


def recorded_pass() -> ForwardPass:
    """Return the forward pass that is running, for a function that does what an `mtp_pass` asks for.

    Raises:
        NotImplementedError: an `mtp_pass` asks for something, and another library has replaced the model's method that
            records the pass, as verl does.
    """
    if not current().is_recorded and mtp_pass_request.get() is not None:
        raise NotImplementedError(
            "mtp_pass has no effect on this model: another library has replaced the method of its class that records "
            "the forward pass (GPTModel._postprocess; verl does). Run the model without mtp_pass"
        )
    return current()


def modelopt_observes(block: torch.nn.Module) -> bool:
    """True if the block has quantizers or hooks of nvidia-modelopt.

    modelopt calibrates quantizers, ranks channels and runs a teacher without gradients. If the heads did not run, they
    would get no ranges, no ranks and no outputs.
    """
    return any(module.startswith("modelopt.") for module in _python_modules(block))


def megatron_fsdp_releases(block: torch.nn.Module) -> bool:
    """True if Megatron-FSDP releases weights of the block after each forward of the layer that has them (ZeRO-3).

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


def record_forward_inputs(call: Call) -> Any:
    """Wraps GPTModel._postprocess, HybridModel.forward and MambaModel.forward: records the pass.

    Without gradients (evaluation, log probabilities of an RL policy) the heads are not needed, unless modelopt observes
    them or an `mtp_pass` asks for them. The block can be skipped if it runs in the same call as the loss; otherwise the
    next pipeline stage expects its output. It runs, without its loss, where Megatron-FSDP releases its weights.

    Disabled heads have no loss in training, whatever an `mtp_pass` asks for, and every stage knows it.
    """
    runs_block = getattr(call.instance, "mtp_process", False) and call.get("mtp_in_postprocess", True)
    request = mtp_pass_request.get()
    trains_heads = current().trains_heads
    is_disabled = trains_heads and are_heads_disabled(call.instance.config)
    if is_disabled:
        computes_loss = False
    elif request is None:
        computes_loss = trains_heads or bool(runs_block and modelopt_observes(call.instance.mtp))
    else:
        computes_loss = request.compute
    can_skip = call.instance.post_process and runs_block and not computes_loss
    with running_pass(
        is_recorded=True,
        input_ids=call.get("input_ids"),
        computes_loss=computes_loss,
        is_idle=is_disabled or bool(can_skip and not megatron_fsdp_releases(call.instance.mtp)),
        request=request,
        metrics=request.metrics if request is not None and computes_loss and not trains_heads else None,
    ):
        return call.proceed()


def skip_idle_block(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: skips the block where the forward pass is idle."""
    if recorded_pass().is_idle:
        return call["hidden_states"]
    return call.proceed()
