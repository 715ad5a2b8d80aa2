"""Distributions over a vocabulary whose logits are whole or cut into the shards of tensor parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

# Where a shard has nothing but padding: the exponential is zero, and products with it are not NaN.
_IMPOSSIBLE = -1e30


class Vocabulary(NamedTuple):
    """The vocabulary as one rank sees it.

    Attributes:
        size: the number of tokens; columns after them pad the output layer. None if no column is padding.
        group: the process group over which the columns are cut, None if this rank has all of them.
    """

    size: int | None
    group: Any

    def without_padding(self, logits: torch.Tensor) -> torch.Tensor:
        """The columns of [..., v] that stand for tokens; one impossible column if there is none."""
        if self.size is None:
            return logits
        columns = self.size - self._first_token(logits)
        if columns <= 0:
            return torch.full_like(logits[..., :1], _IMPOSSIBLE)
        return logits[..., :columns]

    def log_softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise logits over all tokens, with one collective if they are sharded.

        Args:
            logits: [..., v], the columns of this rank.

        Returns:
            ([..., v'] float32, the log probabilities of the columns of this rank that are tokens;
            [...] int64, the most likely token, the same on every rank of the group).
        """
        shard = self.without_padding(logits).float()
        if self.group is None:
            return torch.log_softmax(shard, dim=-1), shard.argmax(dim=-1)
        largest, token = shard.max(dim=-1)
        token = token + self._first_token(logits)
        mass = (shard - largest.unsqueeze(-1)).exp().sum(dim=-1)
        # One message carries all three. float64 represents every logit and every token exactly.
        local = torch.stack([largest.double(), token.double(), mass.double()])
        gathered = local.new_empty(self.group.size(), *local.shape)
        torch.distributed.all_gather_into_tensor(gathered.view(-1), local.view(-1), group=self.group)
        maxima, tokens, masses = gathered.unbind(dim=1)
        maximum, winner = maxima.max(dim=0)
        normaliser = maximum + (masses * (maxima - maximum).exp()).sum(dim=0).log()
        return shard - normaliser.float().unsqueeze(-1), tokens.gather(0, winner.unsqueeze(0)).squeeze(0).long()

    def sum_over_shards(self, *sums: torch.Tensor) -> torch.Tensor:
        """Add up what each rank has summed over its columns, [...] each, with one collective."""
        stacked = torch.stack(sums)
        if self.group is not None:
            torch.distributed.all_reduce(stacked, group=self.group)
        return stacked

    def _first_token(self, logits: torch.Tensor) -> int:
        return 0 if self.group is None else self.group.rank() * logits.size(-1)


def _mtp_logits_are_vocab_sharded(output_layer: Callable[..., Any] | None, runtime_gather_output: bool | None) -> bool:
    """True if each tensor-parallel rank holds only the logits of its part of the vocabulary."""
    if runtime_gather_output is not None:
        return not runtime_gather_output
    return not getattr(output_layer, "gather_output", False)


def _vocab_parallel_argmax(vocab_parallel_logits: torch.Tensor, tp_group: Any, tp_size: int) -> torch.Tensor:
    """The vocabulary index of the largest logit over all ranks of `tp_group`.

    Args:
        vocab_parallel_logits: [..., v / tp_size], the logits of this rank's part of the vocabulary.

    Returns:
        [...] int64, the same on every rank.
    """
    largest, index = vocab_parallel_logits.max(dim=-1)
    # One message carries both. float64 represents every logit and every index exactly.
    local = torch.stack([largest.double(), index.double()])
    gathered = local.new_empty(tp_size, *local.shape)
    torch.distributed.all_gather_into_tensor(gathered.view(-1), local.view(-1), group=tp_group)
    winner = gathered[:, 0].argmax(dim=0, keepdim=True)
    index = gathered[:, 1].gather(0, winner)
    return (winner * vocab_parallel_logits.size(-1) + index.long()).squeeze(0)


def most_likely_token(logits: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """The vocabulary index of the largest logit of [..., v]; `tp_group` is None if each rank has all of them."""
    if tp_group is None or tp_group.size() == 1:
        return logits.argmax(dim=-1)
    return _vocab_parallel_argmax(logits, tp_group, tp_group.size())


def tensor_parallel_group(output_layer: Callable[..., Any] | None, tp_group: Any = None) -> Any:
    """Return `tp_group`, or else the group of the output layer, or else Megatron's own; None if it is one rank."""
    if tp_group is None:
        tp_group = getattr(output_layer, "tp_group", None)
    if tp_group is None and parallel_state.is_initialized():
        tp_group = parallel_state.get_tensor_model_parallel_group()
    return None if tp_group is None or tp_group.size() == 1 else tp_group


def number_of_tokens(config: Any) -> int | None:
    """Return the number of tokens, without padding; None if it is not known, and then all columns count.

    Megatron-Bridge's configuration has it, and the tokenizer of megatron.training. A core TransformerConfig does not.
    """
    size = getattr(config, "vocab_size", None)
    variables = sys.modules.get("megatron.training.global_vars")
    if size is None and variables is not None:
        size = getattr(getattr(variables, "_GLOBAL_TOKENIZER", None), "vocab_size", None)
    return size
