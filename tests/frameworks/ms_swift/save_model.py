"""A random Qwen2 of two layers and data for it: python -m tests.frameworks.ms_swift.save_model FOLDER."""

import json
import sys
from pathlib import Path

from ..byte_tokenizer import save_tokenizer


def save_model(folder):
    """Save the model in FOLDER, in the format of Hugging Face, with a tokenizer of bytes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_mixture(folder):
    """Save a Qwen3 of two layers with two experts each, to which each token goes, likewise."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3MoeConfig(
        vocab_size=320, num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=2, **sizes
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_data(folder):
    """Save questions with answers: sft.jsonl, dpo.jsonl with answers to reject, and pt.jsonl as texts."""
    rows = {"sft": [], "dpo": [], "pt": []}
    for number in range(64):
        question, answer = f"what is {number} plus one", f"it is {number + 1}, of course"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows["sft"].append({"messages": messages})
        rows["dpo"].append({"messages": messages, "rejected_response": "no"})
        rows["pt"].append({"messages": [{"role": "assistant", "content": f"{question}: {answer}"}]})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def save(folder):
    save_model(folder / "model")
    save_data(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
