"""Packed sequences in batches of Megatron's trainer, for reproductions."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from .lab import LENGTH, gather, start, tokens

ENDS = [0, 8, 16]


def ends_of_batch(stages: int, stage: int) -> tuple[list[Any], list[Any]]:
    """Where the sequences of a pack of 16 tokens end in a run with --sft, and what two tensor-parallel ranks are told.

    They are those of a pipeline stage, counted from 0; None for a rank that is told nothing.
    """
    from megatron.core import parallel_state

    start(tensor_model_parallel_size=2)
    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_pipeline_model_parallel_rank(stage)
    ids, positions = tokens()
    batch: dict[str, Any] = {"tokens": ids, "labels": ids, "position_ids": positions}
    batch |= {"loss_mask": torch.ones(1, LENGTH), "max_seqlen": torch.tensor([8], dtype=torch.int32)}
    batch["cu_seqlens"] = torch.tensor([ENDS], dtype=torch.int32)
    ends = _broadcast_batch(batch, stages)["cu_seqlens"]
    return [ENDS] * 2, gather(None if ends is None else ends.flatten().tolist())


def _broadcast_batch(batch: dict[str, Any], stages: int) -> dict[str, Any]:
    """What a rank gets of the batch of the first one."""
    from megatron.core import parallel_state, utils

    if not hasattr(utils, "get_batch_on_this_tp_rank"):  # before 0.18 it is the trainer's
        return _broadcast_batch_of_trainer(batch, stages)
    rank, group = torch.distributed.get_rank(), parallel_state.get_tensor_model_parallel_group()
    ends = {"is_pipeline_first_stage": parallel_state.is_pipeline_first_stage()}
    ends |= {"is_pipeline_last_stage": parallel_state.is_pipeline_last_stage()}
    sizes = (1, rank, 1, LENGTH, False, stages)
    return utils.get_batch_on_this_tp_rank(batch, True, False, False, 0, group, *sizes, **ends)


def _broadcast_batch_of_trainer(batch: dict[str, Any], stages: int) -> dict[str, Any]:
    from megatron.training import arguments, global_vars
    from megatron.training.utils import get_batch_on_this_tp_rank

    sizes = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size {stages}"
    flags = f"--sft --seq-length {LENGTH} --micro-batch-size 1 --no-create-attention-mask-in-dataloader {sizes}"
    sys.argv = ["train", *flags.split()]
    global_vars.set_args(arguments.parse_args())
    return get_batch_on_this_tp_rank(iter([batch]))


def learned_tokens(conversation: list[int], length: int) -> list[int]:
    """The tokens that count in the loss of a sample of the data set for fine-tuning, which has this one conversation.

    Its template gives the tokens of `conversation`. 0 is padding, 1 the end of a document.
    """
    from megatron.training.datasets.sft_dataset import SFTDataset

    tokens = torch.tensor(conversation)
    tokenizer = SimpleNamespace(pad=0, eod=1, tokenize_conversation=lambda messages, **how: (tokens, tokens))
    plain = {"reset_position_ids": False, "create_attention_mask": False, "reset_attention_mask": False}
    data = SFTDataset.__new__(SFTDataset)
    data.dataset, data.indices = [[{"role": "user"}]], [0]
    data.config = SimpleNamespace(tokenizer=tokenizer, sequence_length=length, context_parallel_size=1, **plain)
    sample = data[0]
    return sample["labels"][sample["loss_mask"] > 0].tolist()
