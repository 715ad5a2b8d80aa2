"""The hidden states between layers and their gradients, by sample and by place in the sequence.

They say where a deviation begins. A context-parallel rank has two chunks of a sequence, one of them from its end; under
sequence parallelism, tensor-parallel ranks divide these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .gradients import Parts
from .small import BATCH, LENGTH

Place = tuple[tuple[int, int], tuple[torch.Tensor, slice]]  # the whole shape, and the index of a part


class HiddenStates:
    """The hidden states of a rank.

    Attributes:
        states: by step, from 1: after the embedding, each layer and each MTP head, in the order of the forward pass.
        gradients: by step: those of the loss with respect to `states`, in the order of the backward pass.
            Recomputed layers have none.
    """

    def __init__(self) -> None:
        self.states: dict[int, Parts] = {}
        self.gradients: dict[int, Parts] = {}

    def after(self, steps: int) -> HiddenStates:
        """Those of the steps after so many, which are counted from 1 again."""
        later = HiddenStates()
        for name in ("states", "gradients"):
            setattr(later, name, {step - steps: parts for step, parts in getattr(self, name).items() if step > steps})
        return later

    def watch(self, model: Any) -> None:
        """Record what the parts of a model return for each microbatch. The model is not wrapped."""
        recorder = _Recorder(self, model.config.calculate_per_token_loss)
        # Megatron-FSDP calls the method itself, past the hooks of the model.
        model.forward = recorder.count_microbatches(model.forward)
        for name, part in _parts(model):
            part.register_forward_hook(functools.partial(recorder.end_part, name))


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    if model.pre_process:  # a later stage has a copy, for the tokens that MTP heads look up
        yield "the embedding", model.embedding
    for layer in model.decoder.layers:
        yield f"layer {layer.layer_number}", layer
    for head in getattr(getattr(model, "mtp", None), "layers", ()):
        yield f"MTP head {head.layer_number}", head


class _Recorder:
    """Records the first forward pass of each part in each microbatch of a model; a later one is a recomputation."""

    def __init__(self, hidden: HiddenStates, is_per_token: bool) -> None:
        self.hidden, self.is_per_token = hidden, is_per_token
        self.microbatch, self.is_packed = -1, False

    def count_microbatches(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def count_and_forward(*values: Any, **named: Any) -> Any:
            self.microbatch += 1
            self.is_packed = named.get("packed_seq_params") is not None  # whose chunks are those of documents
            return forward(*values, **named)

        return count_and_forward

    def end_part(self, name: str, part: Any, values: Any, returned: Any) -> None:
        from megatron.core import parallel_state as ranks

        state = returned[0] if isinstance(returned, tuple) else returned
        replicas, pieces = ranks.get_data_parallel_world_size(), ranks.get_context_parallel_world_size()
        microbatches = BATCH // replicas  # of one sample
        step, microbatch = divmod(self.microbatch, microbatches)
        sample = 1 + microbatch * replicas + ranks.get_data_parallel_rank()
        key, place = f"{name}, sample {sample}", _place(state)
        states, gradients = (each.setdefault(step + 1, {}) for each in (self.hidden.states, self.hidden.gradients))
        if key in states or self.is_packed or place is None:
            return
        states[key] = [(*place, _copy(state))]
        if state.requires_grad:
            # A loss is a mean over the tokens of a rank and over microbatches, which the optimizer's gradient is not.
            scale = 1.0 if self.is_per_token else microbatches / pieces

            def record_gradient(gradient: torch.Tensor) -> None:
                gradients[key] = [(*place, scale * _copy(gradient))]

            state.register_hook(record_gradient)


def _copy(state: torch.Tensor) -> torch.Tensor:
    return state.detach().float().reshape(state.shape[0], -1).clone()


def _place(state: torch.Tensor) -> Place | None:
    """Where a hidden state of shape [part of the sequence, 1, hidden] of this rank is in that of the whole sequence.

    None where it is as long as no part that Megatron makes.
    """
    from megatron.core import parallel_state as ranks

    rank, pieces = ranks.get_context_parallel_rank(), ranks.get_context_parallel_world_size()
    whole = torch.arange(LENGTH)
    chunks = whole.chunk(2 * pieces)
    context_positions = torch.cat([chunks[rank], chunks[2 * pieces - 1 - rank]]) if pieces > 1 else whole
    tensor_rank, tensor_ranks = ranks.get_tensor_model_parallel_rank(), ranks.get_tensor_model_parallel_world_size()
    for positions in (context_positions, context_positions.chunk(tensor_ranks)[tensor_rank], whole):
        if len(positions) == len(state):
            return (LENGTH, state.shape[-1]), (positions, slice(None))
    return None
