"""Compares the batches of ranks: those that share one have the same, its parts join, and replicas have others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank

from megatron_overrides.watch.bits import sum_bits
from megatron_overrides.watch.chunks import Chunk
from megatron_overrides.watch.passes import ABSENT, FIELDS, LABELS, TOKENS, Edge, Pass, Recorder
from megatron_overrides.watch.rank_checks import Flaw

logger = logging.getLogger(__name__)
OTHER = "ranks of one replica have different batches"


class Batches:
    """The batches of the chunks of a model, from start() to compare()."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._recorder = Recorder(chunks)
        self._losses: dict[str, torch.Tensor] = {}
        self._has_said = False
        self.start = self._recorder.start

    def compare(self) -> list[Flaw]:
        """Return what is wrong with the batches of this rank since the start. A collective of all ranks.

        One all-reduce over all ranks with 16 bytes; of 8 bytes for each field of each microbatch, one all-reduce over
        a tensor-parallel group and one over a model-parallel one; an all-gather of 96 bytes for each sequence over a
        context-parallel group; and one of 8 bytes over the replicas.
        """
        chunks = self._recorder.stop()
        self._losses = {
            f"loss of microbatch {number}": one.has_nonfinite_loss
            for passes in chunks
            for number, one in enumerate(passes)
            if one.has_nonfinite_loss is not None
        }
        sequences = [one.edges.shape[0] for passes in chunks for one in passes if one.edges is not None]
        sizes = torch.tensor([max(map(len, chunks), default=0), max(sequences, default=0)], device="cuda")
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        microbatches, most_sequences = sizes.tolist()
        if not microbatches:
            self._say_once("watch: compares no batches, as it has seen no forward pass of a language model")
            return []
        sums = torch.full((len(chunks), microbatches, len(FIELDS)), ABSENT, device="cuda")
        for mine, passes in zip(sums, chunks, strict=True):
            for number, one in enumerate(passes):
                mine[number] = one.sums
        return [
            *_compare_shards(sums),
            *_compare_model_parallel(sums),
            *_compare_parts(chunks, microbatches, most_sequences),
            *_compare_replicas(chunks, microbatches),
        ]

    def check_losses(self) -> list[Flaw]:
        """Return the microbatches that compare() has seen to have an inf or NaN where they have a loss."""
        flags = torch.cat(list(self._losses.values())).tolist() if self._losses else []
        return [
            Flaw("not finite", name, "it has an inf or NaN")
            for name, flag in zip(self._losses, flags, strict=True)
            if flag
        ]

    def _say_once(self, text: str) -> None:
        if not self._has_said:
            self._has_said = True
            log_single_rank(logger, logging.WARNING, text)


def _compare_shards(sums: torch.Tensor) -> Iterator[Flaw]:
    """Yield the fields that this rank lacks, and another tensor-parallel rank of its stage has."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        has = (sums != ABSENT).to(torch.int64)
        most = has.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        for name in _name_fields((most > has).any(0)):
            yield Flaw(OTHER, name, "these ranks have none, and another one of their tensor-parallel group has one")


def _compare_model_parallel(sums: torch.Tensor) -> Iterator[Flaw]:
    """Yield the fields of which this rank has other bits than the first rank of its model-parallel group with them."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return
    extremes = torch.stack([sums.amax(0), torch.where(sums == ABSENT, sums, ~sums).amax(0)])
    most = extremes.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    differs = (most[0] != ~most[1]) & (most[0] != ABSENT)
    if not differs.any():
        return
    gathered = _gather(extremes[0], group)
    first_holder = (gathered != ABSENT).to(torch.int64).argmax(0, keepdim=True)
    expected = gathered.gather(0, first_holder)[0]
    is_other = (extremes[0] != ABSENT) & ((extremes[0] != expected) | (~extremes[1] != expected))
    for name in _name_fields(is_other):
        yield Flaw(OTHER, name, "these ranks differ from the first one of their model-parallel group that has it")


def _name_fields(flags: torch.Tensor) -> list[str]:
    """The names of the raised ones of flags [microbatches, fields]."""
    return [f"{FIELDS[field]} of microbatch {number}" for number, field in flags.nonzero().tolist()]


def _compare_parts(chunks: list[list[Pass]], microbatches: int, sequences: int) -> Iterator[Flaw]:
    """Yield a flaw if the parts that this context-parallel rank has of its sequences do not join those of others."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1 or not sequences:
        return
    edges = torch.zeros((microbatches, sequences, 2, len(Edge._fields)), dtype=torch.int64, device="cuda")
    for passes in chunks:
        for number, one in enumerate(passes):
            if one.edges is not None:
                edges[number, : one.edges.shape[0]] = one.edges
    front, back = _gather(edges, group).unbind(3)
    # A rank has one chunk from the front of the sequence, and one from its back.
    broken = _find_broken(torch.cat([front, back.flip(0)]))
    last, rank = 2 * group.size() - 1, group.rank()
    if not {rank, rank - 1, last - rank, last - rank - 1}.isdisjoint(broken):
        text = "the last label of a part is not the first token of the next one"
        yield Flaw("parts of a sequence do not join", f"{LABELS} and {TOKENS}", text)


def _find_broken(chunks: torch.Tensor) -> list[int]:
    """The numbers of the chunks [chunks, microbatches, sequences, Edge] after which no sequence goes on as its labels.

    A sequence in which other labels are not the next tokens, as where documents end, is not expected to; nor where
    either side has no loss. A single one is not enough, as a document may end at that very place.
    """
    edge = Edge(*chunks.unbind(-1))
    follows = edge.some_follow.bool() & edge.none_differs.bool().all(0)
    is_expected = follows[:-1] & follows[1:] & edge.last_counts[:-1].bool() & edge.first_counts[1:].bool()
    is_broken = is_expected & (edge.last_label[:-1] != edge.first_token[1:])
    expected, broken = (flags.flatten(1).sum(1) for flags in (is_expected, is_broken))
    never_joins = (broken == expected) & (broken > 0) & (broken.sum() > 1)
    return [number for (number,) in never_joins.nonzero().tolist()]


def _compare_replicas(chunks: list[list[Pass]], microbatches: int) -> Iterator[Flaw]:
    """Yield a flaw if another replica has the same tokens in each microbatch, of those that are text."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return
    tokens = torch.full((microbatches,), ABSENT, device="cuda")
    for passes in chunks:
        for number, one in enumerate(passes):
            if one.is_text is not None:
                tokens[number] = torch.where(one.is_text, one.sums[FIELDS.index(TOKENS)], ABSENT)
    mine = sum_bits(tokens)
    has_same = (_gather(mine, group) == mine).sum() > 1
    if bool(has_same & (tokens != ABSENT).any()):
        yield Flaw("replicas have the same batch", TOKENS, "these data-parallel ranks have the tokens of another one")


def _gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensors of all ranks of a group, [ranks, ...]."""
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return torch.stack(gathered)
