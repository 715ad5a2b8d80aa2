"""The state that a training step changes besides gradients, restored after a step that must leave no trace."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def without_traces(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Afterwards restore random numbers, buffers (expert biases), what waits to be logged, and the scales of losses.

    Args:
        chunks: the chunks of the model on this rank.
    """
    with ExitStack() as stack:
        for kept in (_random_numbers(), _buffers(chunks), _mtp_log(), _moe_log(), _loss_scales()):
            stack.enter_context(kept)
        yield


@contextmanager
def _random_numbers() -> Iterator[None]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = _copy(dict(tracker.get_states()))
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        tracker.set_states(states)
        torch.cuda.set_rng_state(cuda)
        torch.set_rng_state(cpu)


@contextmanager
def _buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    modules = [module for chunk in chunks for module in chunk.modules()]  # DDP calls something else `buffers`
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    before = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _mtp_log() -> AbstractContextManager[None]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return _entries(MTPLossLoggingHelper.tracker)


def _moe_log() -> AbstractContextManager[None]:
    from megatron.core.transformer.moe import moe_utils

    try:
        logging: Any = importlib.import_module("megatron.core.transformer.moe.moe_logging")
    except ImportError:  # up to 0.17 it is a dict
        return _entries(moe_utils.get_moe_layer_wise_logging_tracker())
    return _another_tracker(logging)


@contextmanager
def _another_tracker(logging: Any) -> Iterator[None]:
    before = logging.get_moe_metrics_tracker()
    logging.set_moe_metrics_tracker(type(before)())
    try:
        yield
    finally:
        logging.set_moe_metrics_tracker(before)


@contextmanager
def _entries(tracker: dict[str, Any]) -> Iterator[None]:
    before = _copy(tracker)
    try:
        yield
    finally:
        tracker.clear()
        tracker.update(before)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _loss_scales() -> Iterator[None]:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    before = [(scaler, scaler.main_loss_backward_scale) for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler)]
    try:
        yield
    finally:
        for scaler, scale in before:
            scaler.main_loss_backward_scale = scale
