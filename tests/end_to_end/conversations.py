"""Conversations and a tokenizer of bytes, on which Megatron trains with packed sequences (--sft)."""

import json

SPECIAL = ("<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")  # of the prompt's format
CONVERSATIONS = 64
LENGTH = "256"  # 0.16.1 fails at a sample that it must cut off


def write_conversations(folder):
    """Write both below `folder`; the command line that trains on them. Needs datasets, and transformers < 5."""
    data, tokenizer = folder / "conversations.jsonl", folder / "tokenizer"
    lines = (json.dumps({"messages": messages(number) + messages(number + 1)}) for number in range(CONVERSATIONS))
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer)
    return [
        *("--sft", "--sft-tokenizer-prompt-format", "nemotron-h-aligned", "--no-create-attention-mask-in-dataloader"),
        "--calculate-per-token-loss",  # else a context-parallel rank without a counted token halves the gradients
        *("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(tokenizer)),
        *("--data-path", str(data), "--micro-batch-size", "1"),
        *("--seq-length", LENGTH, "--max-position-embeddings", LENGTH),
    ]


def messages(number):
    """A conversation; two are packed into one sample."""
    return [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{number} + {number}"},
        {"role": "assistant", "content": f"{2 * number}" * (1 + number % 3)},
    ]


def save_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {"unk_token": "<unk>", "eos_token": "<SPECIAL_12>", "pad_token": "<SPECIAL_233>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(SPECIAL), **named)
    fast.save_pretrained(str(folder))
