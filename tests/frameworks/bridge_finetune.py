"""Finetune or distil the tiny GPT of bridge_pretrain.py by Megatron-Bridge's own `finetune` and `distill`.

    python bridge_finetune.py FOLDER sft|packed|lora|distill ITERATIONS model.mtp_detach_heads=True ...

Starts from the checkpoint that bridge_pretrain.py has saved in FOLDER, and writes to FOLDER/sft and so on. `finetune`
trains on prompts and answers, which `packed` packs in advance; `lora` trains adapters. `distill` has mock data, and a
model without heads for its teacher.
"""

import json
import sys
from pathlib import Path

from bridge_pretrain import configure
from byte_tokenizer import save_tokenizer


def save_answers(folder):
    folder.mkdir(exist_ok=True)
    for split, number in (("training", 64), ("validation", 32), ("test", 32)):
        lines = [{"input": f"what is {one}?", "output": f"it is {one}" + ", ok" * (one % 5)} for one in range(number)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(folder, packed):
    """The data set of prompts and answers, whose configuration Bridge 0.6 renamed."""
    from megatron.bridge.training import config

    save_answers(folder)
    loading = {"num_workers": 0, "persistent_workers": False, "pin_memory": False}
    options = {"dataset_root": str(folder), "seq_length": 64, "seed": 1234, **loading}
    if hasattr(config, "GPTSFTDatasetConfig"):
        from megatron.bridge.data.packing import PackedSequenceSpecs

        dataset, specs = config.GPTSFTDatasetConfig, "offline_packing_specs"
        options["enable_offline_packing"] = packed
    else:
        from megatron.bridge.data.datasets.packed_sequence import PackedSequenceSpecs

        dataset, specs = config.FinetuningDatasetConfig, "packed_sequence_specs"
    if packed:
        padding = {"pad_seq_to_mult": 4}  # each of two context-parallel ranks takes two chunks of a sequence
        options[specs] = PackedSequenceSpecs(packed_sequence_size=64, num_tokenizer_workers=1, **padding)
        options["dataset_kwargs"] = {"pad_to_max_length": True}
    return dataset(**options)


def prepare_finetuning(configuration, folder, kind):
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.config import TokenizerConfig

    save_tokenizer(folder / "tokenizer")
    tokenizer = str(folder / "tokenizer")
    configuration.checkpoint.pretrained_checkpoint = str(folder / "checkpoints")
    configuration.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tokenizer)
    configuration.dataset = answers(folder / kind / "answers", packed=kind == "packed")
    if kind == "packed":
        configuration.train.micro_batch_size = 1
    if kind == "lora":
        configuration.peft = LoRA(target_modules=["linear_proj", "linear_fc1", "linear_fc2"], dim=4, alpha=8)


def finetune(configuration):
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step

    finetune(configuration, forward_step)


def distil(configuration, teacher):
    from megatron.bridge.models.distillation_provider import convert_to_distillation_provider
    from megatron.bridge.training.distill import distill
    from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig

    teacher.mtp_num_layers = None
    configuration.model = convert_to_distillation_provider(configuration.model, teacher, ModelOptDistillConfig())
    distill(configuration)


def main(folder, kind, iterations, *overrides):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    folder = Path(folder)
    (folder / kind).mkdir(exist_ok=True)
    configuration = configure(folder / kind, int(iterations))
    if kind == "distill":
        process_config_with_overrides(configuration, cli_overrides=list(overrides))
        distil(configuration, teacher=configure(folder, 1).model)
    else:
        prepare_finetuning(configuration, folder, kind)
        process_config_with_overrides(configuration, cli_overrides=list(overrides))
        finetune(configuration)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvrx"))
    main(*sys.argv[1:])
