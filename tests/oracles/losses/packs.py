"""Sequences in slots, with padding, and where context parallelism puts them: in plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Pack:
    """`sequences`: the tokens of each sequence, and its slots, which the tokens begin; `tail`: slots after the last."""

    sequences: tuple[tuple[int, int], ...]
    tail: int = 0

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return (first slot, slot after the last token, slot after the padding) of each sequence."""
        begins = accumulate((slots for _, slots in self.sequences), initial=0)
        return [
            (begin, begin + tokens, begin + slots)
            for begin, (tokens, slots) in zip(begins, self.sequences, strict=False)
        ]

    @property
    def size(self) -> int:
        return sum(slots for _, slots in self.sequences) + self.tail

    def params(self) -> Any:
        """Return Megatron's PackedSeqParams."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        ends, padded = (
            torch.tensor([0, *accumulate(numbers)], dtype=torch.int32) for numbers in zip(*self.sequences, strict=True)
        )
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        )

    def of_rank(self, values: list, rank: int, ranks: int) -> list:
        """Return the rank's chunk from the front and its chunk from the back of each sequence."""
        mine = []
        for begin, _, end in self.spans:
            chunk = (end - begin) // (2 * ranks)
            for number in (rank, 2 * ranks - 1 - rank):
                mine += values[begin + number * chunk : begin + (number + 1) * chunk]
        share = self.tail // ranks
        first = self.size - self.tail + rank * share
        return mine + values[first : first + share] if ranks > 1 else values

    def roll(self, values: list, fill: object = 0) -> list:
        """Return the next token of its sequence for each slot, and `fill` where there is none."""
        rolled = [fill] * self.size
        for begin, end, _ in self.spans:
            for slot in range(begin, end - 1):
                rolled[slot] = values[slot + 1]
        return rolled

    @property
    def holds_token(self) -> list[int]:
        held = [0] * self.size
        for begin, end, _ in self.spans:
            held[begin:end] = [1] * (end - begin)
        return held
