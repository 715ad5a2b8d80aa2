"""Give a model MTP heads whose checkpoint has none: hide them while it is loaded, then initialize them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@contextmanager
def hidden_heads(chunks: Sequence[Any]) -> Iterator[None]:
    """Let the model chunks of this rank look like those of a model without MTP heads.

    Args:
        chunks: models such as GPTModel, without wrappers.
    """
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if getattr(chunk, "mtp_process", False):
                stack.enter_context(_hidden_heads(chunk))
        yield


@contextmanager
def _hidden_heads(chunk: Any) -> Iterator[None]:
    modules = dict(chunk._modules)
    output_weight = chunk.output_layer.weight if chunk.post_process else None
    del chunk._modules["mtp"]
    if not chunk.pre_process:  # only the heads use the embedding of this stage
        del chunk._modules["embedding"]
        if chunk.post_process and chunk.share_embeddings_and_output_weights:
            # Without heads the output layer of the last stage holds the copy of the embedding.
            chunk.output_layer.weight = modules["embedding"].word_embeddings.weight
    chunk.mtp_process = False
    try:
        yield
    finally:
        chunk.mtp_process = True
        chunk._modules.clear()
        chunk._modules.update(modules)
        if chunk.post_process:
            chunk.output_layer.weight = output_weight


def copy_embedding_to_heads(chunks: Sequence[Any]) -> None:
    """Give the stage of the heads, if it is not the first one, the values of the word embedding of the first stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    copies = [
        chunk.embedding.word_embeddings.weight.data
        for chunk in chunks
        if getattr(chunk, "mtp_process", False) and not chunk.pre_process
    ]
    stages: list[int] = [0] * group.size()
    dist.all_gather_object(stages, len(copies), group=group)
    if group.rank() == 0:
        weight = next(chunk.embedding.word_embeddings.weight.data for chunk in chunks if chunk.pre_process)
        for copy in copies:
            copy.copy_(weight)
        for rank, count in zip(ranks[1:], stages[1:], strict=True):
            for _ in range(count):
                dist.send(weight, dst=rank, group=group)
    else:
        for copy in copies:
            dist.recv(copy, src=ranks[0], group=group)


class LastLayer(NamedTuple):
    """The end of the main model.

    Attributes:
        number: of its last decoder layer, counted over all pipeline stages.
        layer: the state of that layer, on the CPU.
        norm: the state of the norm behind it.
    """

    number: int
    layer: dict[str, Any]
    norm: dict[str, Any]


def initialize_from_last_layer(chunks: Sequence[Any]) -> None:
    """Copy the last decoder layer of the main model, and the norm behind it, into each head.

    The stage that has them sends them to all pipeline stages; what Megatron has split stays split in the same
    way. `enorm` and `hnorm` stay ones, `eh_proj` random.

    Raises:
        ValueError: a head has another kind of layer than the last one of the main model, or there is no head; on all
            ranks.
    """
    last = _find_last_layer(chunks)
    problems = [_fill(chunk.mtp, last) for chunk in chunks if getattr(chunk, "mtp_process", False)]
    problems_of_ranks: list[list[str | None]] = [[]] * dist.get_world_size()
    dist.all_gather_object(problems_of_ranks, problems)
    if not any(problems_of_ranks):
        raise ValueError("No pipeline stage has MTP heads that could start from the last layer: leave last-layer out")
    for problem in itertools.chain.from_iterable(problems_of_ranks):
        if problem:
            raise ValueError(problem)


def _find_last_layer(chunks: Sequence[Any]) -> LastLayer:
    """Return the last layer of all pipeline stages, as it is split for this tensor- and expert-parallel rank."""
    group = parallel_state.get_pipeline_model_parallel_group()
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    last = max(layers, key=lambda layer: layer.layer_number, default=None)
    numbers: list[int] = [0] * group.size()
    dist.all_gather_object(numbers, 0 if last is None else last.layer_number, group=group)
    norms = [getattr(chunk.decoder, name, None) for chunk in chunks for name in ("final_layernorm", "final_norm")]
    owner = numbers.index(max(numbers))
    message: list[Any] = [None]
    if owner == group.rank():
        norm = next((norm for norm in norms if norm is not None), torch.nn.Identity())
        message = [LastLayer(max(numbers), _state(last), _state(norm))]
    dist.broadcast_object_list(message, src=dist.get_process_group_ranks(group)[owner], group=group)
    return message[0]


def _state(module: Any) -> dict[str, Any]:
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
        if not name.endswith("_extra_state")
    }


def _fill(block: Any, last: LastLayer) -> str | None:
    """Copy into the heads of a block; return what keeps that from being done, or None."""
    for head in block.layers:
        layer = getattr(head, "mtp_model_layer", None) or head.transformer_layer
        for module, state in ((layer, last.layer), (head.final_layernorm, last.norm)):
            difference = _difference(_state(module), state)
            if difference:
                return (
                    f"--mtp-init last-layer copies decoder layer {last.number} of the main model into each MTP head, "
                    f"but they are of different kinds: {difference}. Use --mtp-init random"
                )
            module.load_state_dict(state, strict=False)  # without the _extra_state of TransformerEngine
    return None


def _difference(head: dict[str, Any], main: dict[str, Any]) -> str | None:
    """Return the first difference between two states, or None if they have the same names and shapes."""
    for name in (*main, *head):
        if name not in head or name not in main:
            return f"{name} is only in the {'head' if name in head else 'main model'}"
        if head[name].shape != main[name].shape:
            return f"{name} has shape {tuple(head[name].shape)} in the head, {tuple(main[name].shape)} in that layer"
    return None
