"""Train the demo's model on megatron-core 0.16.1, whose wheel has no megatron.training.

Reads those of Megatron's flags that the tests use, and prints the log line of Megatron's trainer. The optimizer, the
gradient buffers, the schedule and the model are Megatron's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_overrides.report.metrics import training_metrics
from scripts.demo import dataset
from scripts.demo.trainer import be_one_process, forward_step
from scripts.tiny_gpt import build_gpt, make_config, start_process_groups

NUMBERS = """
    num-layers hidden-size ffn-hidden-size num-attention-heads seq-length vocab-size mtp-num-layers global-batch-size
    train-iters lr-warmup-iters eval-iters seed
""".split()
REALS = "lr min-lr clip-grad adam-beta2 weight-decay mtp-loss-scaling-factor mtp-clip-grad".split()


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flags, type_ in ((NUMBERS, int), (REALS, float)):
        for flag in flags:
            parser.add_argument(f"--{flag}", type=type_)
    parser.add_argument("--split")
    parser.add_argument("--data-path", nargs=1)
    parser.add_argument("--data-cache-path")
    parser.add_argument("--transformer-impl")
    parser.add_argument("--lr-decay-style")
    parser.add_argument("--grad-norm-skip-threshold", type=float, default=inf)
    parser.add_argument("--mtp-detach-heads", action="store_true")
    parser.add_argument("--freeze-base-model-for-mtp", action="store_true")
    parser.add_argument("--mtp-acceptance-interval", type=int, default=1)
    # The rest of the command line chooses among things that only Megatron's trainer has.
    return dataset.add_arguments(parser).parse_known_args()[0]


def asked_for(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The settings that differ from their defaults: without its patch the release has no such field."""
    return {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}


def build(args: argparse.Namespace) -> tuple[Any, Any, OptimizerParamScheduler]:
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    config = make_config(
        **{name: getattr(args, name) for name in (*same, "mtp_num_layers", "mtp_loss_scaling_factor")},
        masked_softmax_fusion=False,
        attention_backend=AttnBackend.unfused,
        finalize_model_grads_func=finalize_model_grads,
        **asked_for(args, mtp_detach_heads=False, freeze_base_model_for_mtp=False, mtp_acceptance_interval=1),
    )
    transformer_engine = args.transformer_impl == "transformer_engine"
    gpt = build_gpt(config, args.vocab_size, args.seq_length, transformer_engine).cuda()
    print(f"attention: {type(gpt.decoder.layers[0].self_attention.core_attention).__name__}", flush=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    same = ("lr", "min_lr", "weight_decay", "adam_beta2", "clip_grad")
    settings = {name: getattr(args, name) for name in same}
    settings |= asked_for(args, grad_norm_skip_threshold=inf, mtp_clip_grad=None)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **settings), [model])
    batch = args.global_batch_size  # the schedule counts samples, as Megatron's trainer does
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.train_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def batches(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=args.vocab_size)
    size = args.global_batch_size
    samples: Any = dataset.build(args, tokenizer, [args.train_iters * size, args.eval_iters * size, None])[0]
    for start in range(0, len(samples) - size + 1, size):
        batch = [samples[index] for index in range(start, start + size)]
        yield {key: torch.stack([sample[key] for sample in batch]) for key in batch[0]}


def main() -> None:
    args = read_flags()
    be_one_process()
    torch.cuda.set_device(0)
    start_process_groups()
    model, optimizer, scheduler = build(args)
    data = batches(args)
    model.train()
    for iteration in range(1, args.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=1,
            seq_length=args.seq_length,
            micro_batch_size=args.global_batch_size,
            forward_only=False,
        )
        loss, n_tokens = reports[0]["lm loss"].tolist()
        updated, grad_norm, _ = optimizer.step()
        learning_rate = optimizer.param_groups[0]["lr"]
        if updated:
            scheduler.step(increment=args.global_batch_size)
        MTPLossLoggingHelper.track_mtp_metrics(1.0, iteration, None)
        more = "".join(metric.text for metric in training_metrics())
        print(
            f" iteration {iteration:8d}/{args.train_iters:8d} | learning rate: {learning_rate:.6E} | "
            f"lm loss: {loss / n_tokens:.6E} | grad norm: {grad_norm:.3f} | "
            f"number of skipped iterations: {int(not updated):3d} |{more}",
            flush=True,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
