"""Pretrain a tiny GPT with an MTP head by Megatron-Bridge's own `pretrain`, on mock data.

    python bridge_pretrain.py FOLDER ITERATIONS model.mtp_detach_heads=true model.mtp_loss_type=tv ...

What follows ITERATIONS are overrides in Hydra's syntax. Saves to FOLDER/checkpoints after ITERATIONS, and goes on from
a checkpoint that is there.
"""

import sys
from pathlib import Path


def configure(folder, iterations):
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config

    checkpoints = str(folder / "checkpoints")
    return config.ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            ffn_hidden_size=128,
            num_attention_heads=4,
            seq_length=64,
            vocab_size=512,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            pipeline_dtype=torch.bfloat16,
            mtp_num_layers=1,
            mtp_loss_scaling_factor=0.3,
        ),
        train=config.TrainingConfig(train_iters=iterations, global_batch_size=4, micro_batch_size=2),
        validation=config.ValidationConfig(eval_interval=1000, eval_iters=1),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, clip_grad=1.0, bf16=True),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            lr_warmup_iters=0,
            lr_decay_iters=1000,
            override_opt_param_scheduler=True,
        ),
        ddp=config.DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        dataset=config.GPTDatasetConfig(
            blend=None,
            blend_per_split=None,
            split="9999,8,2",
            seq_length=64,
            eod_mask_loss=False,
            reset_attention_mask=False,
            reset_position_ids=False,
            dataloader_type="single",
            num_workers=0,
            persistent_workers=False,
            random_seed=1234,
        ),
        logger=config.LoggerConfig(log_interval=1, tensorboard_dir=str(folder / "tensorboard")),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=511),
        checkpoint=config.CheckpointConfig(
            ckpt_format="torch_dist", save=checkpoints, load=checkpoints, save_interval=iterations, async_save=False
        ),
        rng=config.RNGConfig(seed=1234),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        mixed_precision="bf16_mixed",
    )


def main(folder, iterations, *overrides):
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    configuration = configure(Path(folder), int(iterations))
    process_config_with_overrides(configuration, cli_overrides=list(overrides))
    pretrain(configuration, forward_step)


if __name__ == "__main__":  # saving starts processes that import this file
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvrx"))
    main(*sys.argv[1:])
