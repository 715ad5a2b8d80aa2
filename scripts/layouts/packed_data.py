"""Conversations and a tokenizer of bytes, on which Megatron trains with packed sequences (--sft)."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")  # of the prompt's format
CONVERSATIONS = 64
SEQUENCE = 256  # 0.16.1 fails at a sample that it must cut off


def flags(folder: Path) -> list[str]:
    """Write both below `folder`; the command line that trains on them. Needs datasets, and transformers < 5."""
    data, tokenizer = folder / "conversations.jsonl", folder / "tokenizer"
    _write_conversations(data)
    _write_tokenizer(tokenizer)
    length = str(SEQUENCE)
    return [
        *("--sft", "--sft-tokenizer-prompt-format", "nemotron-h-aligned", "--no-create-attention-mask-in-dataloader"),
        "--calculate-per-token-loss",  # else a context-parallel rank without a counted token halves the gradients
        *("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(tokenizer)),
        *("--data-path", str(data), "--micro-batch-size", "1"),
        *("--seq-length", length, "--max-position-embeddings", length),
    ]


def _write_conversations(file: Path) -> None:
    """Two conversations a line, which are packed into one sample."""
    with file.open("w", encoding="utf-8") as lines:
        for number in range(CONVERSATIONS):
            messages = []
            for each in (number, number + 1):
                messages += [
                    {"role": "system", "content": "Add."},
                    {"role": "user", "content": f"{each} + {each}"},
                    {"role": "assistant", "content": f"{2 * each}" * (1 + each % 3)},
                ]
            lines.write(json.dumps({"messages": messages}) + "\n")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    letter_tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letter_tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letter_tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letter_tokens,
        unk_token="<unk>",
        eos_token="<SPECIAL_12>",
        pad_token="<SPECIAL_233>",
        additional_special_tokens=list(SPECIAL),
    )
    tokenizer.save_pretrained(str(folder))
