"""Records what the passes of a step get as their batches: sums of bits, and what joins the parts of a sequence."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from megatron_overrides.watch.bits import sum_bits
from megatron_overrides.watch.chunks import Chunk

TOKENS, POSITIONS, LABELS, LOSS_MASK = "input_ids", "position_ids", "labels", "loss_mask"
PACKING = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
FIELDS = (TOKENS, POSITIONS, LABELS, LOSS_MASK, *PACKING)
ABSENT = torch.iinfo(torch.int64).min  # in the place of a sum
MOST = 4096  # passes of a step that are compared


class Pass(NamedTuple):
    """A forward pass of a microbatch through a chunk of a model.

    Attributes:
        sums: of the bits of each of FIELDS, int64 [fields]; ABSENT where the chunk does not use it.
        is_text: a flag [1] that its tokens are neither mock data nor padding; None without tokens.
        edges: of both context-parallel chunks of each sequence, int64 [sequences, 2, Edge]; None where the parts of a
            sequence need not join, or tokens, labels or mask are not here.
        has_nonfinite_loss: a flag [1]; None where it has no loss.
    """

    sums: torch.Tensor
    is_text: torch.Tensor | None
    edges: torch.Tensor | None
    has_nonfinite_loss: torch.Tensor | None


class Edge(NamedTuple):
    """What joins a chunk to the next one and the one before, and two flags that its labels are the next tokens."""

    first_token: torch.Tensor
    first_counts: torch.Tensor
    last_label: torch.Tensor
    last_counts: torch.Tensor
    some_follow: torch.Tensor
    none_differs: torch.Tensor


class Recorder:
    """Records the passes of chunks of a model: those with gradients, of a training model, outside of CUDA graphs.

    A model that is no language model of Megatron's, as one of several modalities, may cut its batch by itself: it has
    no passes here, nor has one whose groups are not those of parallel_state.
    """

    def __init__(self, chunks: list[Chunk]) -> None:
        from megatron.core.models.common.language_module.language_module import LanguageModule  # imports the optimizer

        is_initialized = parallel_state.model_parallel_is_initialized()
        self._chunks = chunks
        self._are_seen = [
            is_initialized
            and isinstance(chunk.model, LanguageModule)
            and TOKENS in inspect.signature(chunk.model.forward).parameters
            for chunk in chunks
        ]
        self._passes: list[list[Pass]] = [[] for _ in chunks]
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Record from here on. Hooks of the model itself would not run in the fp32 models of Megatron-FSDP."""
        self._hooks = [
            chunk.wrapped.register_forward_hook(partial(_record, passes, chunk.model), with_kwargs=True)
            for chunk, passes, is_seen in zip(self._chunks, self._passes, self._are_seen, strict=True)
            if is_seen
        ]

    def stop(self) -> list[list[Pass]]:
        """Return the passes of each chunk since the start."""
        for hook in self._hooks:
            hook.remove()
        passes, self._passes = self._passes, [[] for _ in self._chunks]
        return passes


def _record(
    passes: list[Pass], model: Any, wrapped: Any, values: tuple[Any, ...], named: dict[str, Any], output: Any
) -> None:
    if len(passes) == MOST:  # of an optimizer that steps as a part of another, so that nothing stops its recorder
        return
    if model.training and torch.is_grad_enabled() and not torch.cuda.is_current_stream_capturing():
        with torch.no_grad():
            passes.append(_describe(model, _find_fields(model, values, named), output))


def _find_fields(model: Any, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The fields of the batch that a chunk uses. verl and ms-swift give others to stages that do not."""
    arguments = inspect.signature(model.forward).bind_partial(*values).arguments | named
    has_heads = getattr(model, "mtp_process", False)
    used = {
        **dict.fromkeys((TOKENS, POSITIONS), model.pre_process or has_heads),
        **dict.fromkeys((LABELS, LOSS_MASK), model.post_process or has_heads),
    }
    fields = {name: arguments.get(name) for name, is_used in used.items() if is_used}
    fields |= {name: getattr(arguments.get("packed_seq_params"), name, None) for name in PACKING}
    return {name: field for name, field in fields.items() if torch.is_tensor(field)}


def _describe(model: Any, fields: dict[str, torch.Tensor], output: Any) -> Pass:
    tokens, labels, mask = fields.get(TOKENS), fields.get(LABELS), fields.get(LOSS_MASK)
    absent = torch.full((1,), ABSENT, device="cuda")
    sums = torch.cat([sum_bits(fields[name]).to(absent.device) if name in fields else absent for name in FIELDS])
    counts = None if labels is None else labels >= 0 if mask is None else mask != 0
    flag = None
    if model.post_process and counts is not None and torch.is_tensor(output) and output.shape == counts.shape:
        flag = (counts & ~output.isfinite()).any().view(1)
    is_text = None if tokens is None else _is_text(tokens) & (mask is None or mask.any())
    edges = None
    if tokens is not None and labels is not None and mask is not None and not fields.keys() & set(PACKING):
        edges = _find_edges(tokens, labels, mask != 0)
    return Pass(sums, is_text, edges, flag)


def _is_text(tokens: torch.Tensor) -> torch.Tensor:
    """False for tokens most of which count up, as those of Megatron's MockGPTDataset, or repeat the one before."""
    steps = tokens.diff(dim=-1)
    return (((steps == 0) | (steps == 1)).sum() * 2 <= steps.numel()).view(1)


def _find_edges(tokens: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    if not tokens.shape == labels.shape == counts.shape or tokens.dim() != 2 or tokens.shape[1] % 2:
        return None
    tokens, labels, counts = (one.unflatten(1, (2, -1)) for one in (tokens, labels, counts))
    follows = labels[..., :-1] == tokens[..., 1:]
    inner = counts[..., :-1]
    edge = Edge(
        tokens[..., 0],
        counts[..., 0],
        labels[..., -1],
        counts[..., -1],
        (inner & follows).any(-1),
        ~(inner & ~follows).any(-1),
    )
    return torch.stack([one.to(torch.int64) for one in edge], dim=-1)
