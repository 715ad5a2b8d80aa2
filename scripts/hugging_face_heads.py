r"""Add MTP heads to a model of Hugging Face with Megatron-Bridge: train them alone, export both, and read them back.

    megatron-mtp-patches run hugging_face_heads.py train BASE HEADS [data=PREFIX] [heads=1] [seq_length=4096] \
        [GROUP.FIELD=VALUE ...]
    megatron-mtp-patches run hugging_face_heads.py export BASE HEADS OUT
    megatron-mtp-patches run hugging_face_heads.py check BASE OUT

BASE is the folder of the model, HEADS that of the checkpoints, OUT that of the exported model. PREFIX is a dataset of
Megatron's; without one the data are random. GROUP.FIELD=VALUE is an override of Megatron-Bridge, in Hydra's syntax.
docs/add-heads-to-a-hugging-face-model.md shows all of it.
"""

import inspect
import shutil
import sys
from pathlib import Path

SETTINGS = {
    "model.mtp_init": "last-layer",  # the heads start from the last layer
    "model.freeze_base_model_for_mtp": "true",
    "model.mtp_loss_type": "e2e_tv",
    "model.mtp_loss_scaling_factor": "1.0",
}


def train(base, heads_folder, data=None, heads="1", seq_length="4096", **settings):
    if not Path(base, "config.json").is_file():
        raise SystemExit(f"{base} is no folder of a model: it has no config.json")
    if not heads.isdecimal() or int(heads) < 1:
        raise SystemExit(f"heads={heads}: give the number of heads, 1 or more")
    if not seq_length.isdecimal():
        raise SystemExit(f"seq_length={seq_length}: give the number of tokens of a sample")
    saved_heads = count_saved_heads(heads_folder)
    if saved_heads not in (None, int(heads)):
        raise SystemExit(
            f"the checkpoint in {heads_folder} has {saved_heads} heads: give heads={saved_heads}, or another folder"
        )
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    bridge = AutoBridge.from_hf_pretrained(base)
    bridge.hf_pretrained.config.num_nextn_predict_layers = int(heads)  # Bridge builds the model with heads
    model = bridge.to_megatron_provider(load_weights=True)
    model.bf16, model.params_dtype, model.seq_length = True, torch.bfloat16, int(seq_length)
    optimizer = config.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, clip_grad=1.0, bf16=True)
    dataset = config.GPTDatasetConfig(
        blend=([data], None) if data else None,
        split="99,1,0",
        seq_length=int(seq_length),
        random_seed=1234,
        eod_mask_loss=False,
        reset_attention_mask=False,
        reset_position_ids=False,
        dataloader_type="single",
    )
    random_tokens = {"tokenizer_type": "NullTokenizer", "vocab_size": model.vocab_size - 1}
    tokens = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": base} if data else random_tokens
    run = config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(train_iters=1000, global_batch_size=64, micro_batch_size=1),
        validation=config.ValidationConfig(eval_interval=100, eval_iters=2),
        optimizer=optimizer,
        scheduler=config.SchedulerConfig(lr_decay_style="cosine", start_weight_decay=0.01, end_weight_decay=0.01),
        ddp=config.DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        dataset=dataset,
        logger=config.LoggerConfig(log_interval=1, filter_warnings=False),
        tokenizer=config.TokenizerConfig(**tokens),
        checkpoint=config.CheckpointConfig(save=heads_folder, load=heads_folder, save_interval=100),
        mixed_precision="bf16_mixed",
    )
    overrides = {**SETTINGS, **settings}
    process_config_with_overrides(run, cli_overrides=[f"{path}={value}" for path, value in overrides.items()])
    pretrain(run, forward_step)


def count_saved_heads(heads_folder):
    """The number of heads in the newest checkpoint; None if there is none."""
    import yaml

    saved = sorted(Path(heads_folder).glob("iter_*/run_config.yaml"))  # an iteration has seven digits
    return yaml.safe_load(saved[-1].read_text())["model"]["mtp_num_layers"] if saved else None


def export(base, heads_folder, out):
    """from_hf_config: with the configuration alone Bridge exports the heads, too, which `base` lacks."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    heads = count_saved_heads(heads_folder)
    if heads is None:
        raise SystemExit(f"there is no checkpoint of Megatron-Bridge in {heads_folder}")
    config = AutoConfig.from_pretrained(base)
    config.num_nextn_predict_layers = heads
    AutoBridge.from_hf_config(config).export_ckpt(heads_folder, out)
    for file in Path(base).iterdir():  # the tokenizer and the like
        is_weight = "safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth")
        if file.is_file() and not is_weight and not Path(out, file.name).exists():
            shutil.copy(file, out)


def check(base, out):
    """Compare the weights of `out` with those of `base`, and with what Megatron-Bridge makes of them."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    exported, main = (AutoBridge.from_hf_pretrained(folder).hf_pretrained.state for folder in (out, base))
    bridge = AutoBridge.from_hf_pretrained(out)
    with temporary_distributed_context(backend="gloo"):
        model = bridge.to_megatron_model(wrap_with_ddp=False, use_cpu_initialization=True)
        read_back = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    heads = sorted(set(exported) - set(main))
    changed = [name for name in main if not torch.equal(main[name], exported[name])]
    differing = [name for name in exported if not torch.equal(exported[name], read_back[name].cpu())]
    broken = [name for name in heads if not exported[name].isfinite().all()]
    print(*heads, sep="\n")
    print(
        f"{len(heads)} tensors of heads, {len(broken)} of them not finite; {len(main)} of the model, {len(changed)} of "
        f"them changed; {len(differing)} of all differ after reading them back"
    )
    sys.exit(bool(changed or differing or broken or not heads))


if __name__ == "__main__":  # saving starts processes that import this file
    name, *words = sys.argv[1:] or [""]
    command = {"train": train, "export": export, "check": check}.get(name)
    folders = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    try:
        inspect.signature(command).bind(*folders, **options)
    except TypeError as error:
        sys.exit(f"{__doc__}\n{error if command else 'the first word is train, export or check'}")
    command(*folders, **options)
