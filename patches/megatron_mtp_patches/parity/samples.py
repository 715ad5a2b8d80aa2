"""The samples of a small run: each depends on its index alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .small import LENGTH, VOCABULARY

UNEVEN, WHOLE = "uneven", "whole"
SEQUENCES = 3  # in a packed sample
UNIT = 4  # of their lengths: a context-parallel rank of two has a chunk from the front and one from the back


class Samples(torch.utils.data.Dataset):
    """Random tokens with loss masks of different lengths, as GPTDataset gives them.

    Where a sample packs sequences (--sft, --dataloader-inter-document-masking), it has three of them, with their ends.

    Args:
        count: how many.
        arguments: Megatron's arguments.
        kind: "uneven", or "whole" for loss masks of ones.
        vocabulary: the number of tokens that are drawn.
    """

    def __init__(self, count: int, arguments: Any, kind: str, vocabulary: int) -> None:
        self.count, self.kind, self.vocabulary = count, kind, vocabulary
        self.length = arguments.seq_length
        self.with_attention_mask = arguments.create_attention_mask_in_dataloader
        self.resets_positions = bool(arguments.reset_position_ids)
        self.resets_attention = bool(arguments.reset_attention_mask)
        self.is_packed = bool(arguments.sft or getattr(arguments, "dataloader_inter_document_masking", False))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + int(index))
        tokens = torch.randint(self.vocabulary, (self.length + 1,), generator=generator)
        document = int(torch.randint(self.length // 4, self.length // 2, (1,), generator=generator))
        positions = torch.arange(self.length)
        if self.resets_positions:
            positions[document:] -= document
        sample = {"tokens": tokens[:-1].clone(), "labels": tokens[1:].clone(), "position_ids": positions}
        sample["loss_mask"] = self._loss_mask(int(index), generator)
        if self.with_attention_mask:
            visible = torch.ones(1, self.length, self.length).tril()
            if self.resets_attention:
                visible[:, document:, :document] = 0
            sample["attention_mask"] = visible < 0.5
        if self.is_packed:
            ends = self._ends(generator)
            lengths = ends.diff()
            sample |= {"cu_seqlens": ends, "max_seqlen": lengths.max()}
            sample["position_ids"] = torch.cat([torch.arange(int(length)) for length in lengths])
        return sample

    def _ends(self, generator: torch.Generator) -> torch.Tensor:
        """0 and the ends of packed sequences, whose lengths two context-parallel ranks can balance."""
        inner = torch.randperm(self.length // UNIT - 1, generator=generator)[: SEQUENCES - 1] + 1
        parts = [torch.zeros(1, dtype=torch.long), inner.sort().values * UNIT, torch.tensor([self.length])]
        return torch.cat(parts).int()

    def _loss_mask(self, index: int, generator: torch.Generator) -> torch.Tensor:
        """Ones; or of four samples two have a prompt, one an end without loss, and one both."""
        mask = torch.ones(self.length)
        if self.kind == UNEVEN:
            cut = int(torch.randint(1, self.length, (1,), generator=generator))
            if index % 4 == 1:
                mask[cut:] = 0
            elif index % 4 == 2:
                mask[: self.length // 4] = 0
                mask[self.length - self.length // 4 :] = 0
            else:
                mask[:cut] = 0
        return mask


def plain_samples(count: int, kind: str) -> Samples:
    """Samples of one sequence each, for trainers without Megatron's arguments."""
    off = ("create_attention_mask_in_dataloader", "reset_position_ids", "reset_attention_mask", "sft")
    return Samples(count, SimpleNamespace(seq_length=LENGTH, **dict.fromkeys(off, False)), kind, VOCABULARY - 1)
