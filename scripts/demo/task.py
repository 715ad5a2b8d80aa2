"""What is trained: a small GPT with one MTP head, on text some of whose batches arrive still compressed.

The same for every release of Megatron; `train.py` hands it to a trainer.
"""

from __future__ import annotations

import zlib
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.data import Dataset


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group(title="demo")
    group.add_argument(
        "--corrupt-iterations",
        type=int,
        nargs="*",
        default=[],
        help="iterations whose batch arrives still compressed (zlib) instead of as text",
    )
    return parser


def build_model(
    config: TransformerConfig, vocab_size: int, seq_length: int, transformer_engine: bool = False, **placement: Any
) -> GPTModel:
    """Of Megatron's own layers, or of TransformerEngine's.

    `placement`: what the release passes of pre_process, post_process, vp_stage etc.
    """
    layer_spec = get_gpt_layer_with_transformer_engine_spec() if transformer_engine else get_gpt_layer_local_spec()
    mtp_spec = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=transformer_engine)
    return GPTModel(
        config,
        layer_spec,
        vocab_size=vocab_size,
        max_sequence_length=seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        mtp_block_spec=mtp_spec,
        **placement,
    )


class SomeBatchesCompressed(Dataset):
    """Training samples; those of the named iterations come from the compressed file.

    The accident is an ordinary one: a shard that nobody unpacked. Compressed bytes look like noise, so a
    model that has learned text is wrong about every byte, and the gradient norm jumps.
    """

    def __init__(self, text: Dataset, iterations: list[int], global_batch_size: int, prefix: str) -> None:
        self.text = text
        self.iterations = set(iterations)
        self.global_batch_size = global_batch_size
        self.split = getattr(text, "index_split", None)
        packed = zlib.compress(Path(f"{prefix}.bin").read_bytes()[: 1 << 22])
        self.packed = torch.frombuffer(bytearray(packed), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.text[index]
        # Megatron's sampler walks the dataset in order, one global batch an iteration, from iteration 1.
        if index // self.global_batch_size + 1 not in self.iterations:
            return sample
        length = len(sample["tokens"])
        start = index * (length + 1) % (len(self.packed) - length - 1)
        window = self.packed[start : start + length + 1]
        return {**sample, "tokens": window[:-1], "labels": window[1:]}


def build_datasets(args: Namespace, tokenizer: Any, sizes: list[int | None]) -> list[Dataset | None]:
    """Train, validation and test sets; only training batches are corrupted."""
    prefix = args.data_path[0]
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([prefix], None),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # causal
        mid_level_dataset_surplus=0.005,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return [
        SomeBatchesCompressed(train, args.corrupt_iterations, args.global_batch_size, prefix),
        valid,
        test,
    ]


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss summed over the tokens, their number, and what the training log averages."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    n_tokens = mask.sum().to(torch.int)
    return loss, n_tokens, {"lm loss": torch.stack([loss.detach(), n_tokens.to(loss.dtype)])}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    tokens, labels, loss_mask, position_ids = (
        batch[key].cuda(non_blocking=True) for key in ("tokens", "labels", "loss_mask", "position_ids")
    )
    losses = model(tokens, position_ids, None, labels=labels, loss_mask=loss_mask)
    return losses, partial(loss_function, loss_mask)
