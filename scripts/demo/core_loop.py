"""A training loop on megatron-core classes, for 0.16.1, whose wheel ships no `megatron.training`.

Reads those of Megatron's flags that the demo uses, prints the log line and writes the TensorBoard scalars of
Megatron's trainer. The optimizer, the gradient buffers, the schedule and the model are Megatron's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import task
import torch
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils.tensorboard import SummaryWriter

from megatron_overrides.support.training_metrics import training_metrics

CHECKPOINT = "checkpoint.pt"


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in (
        "num-layers hidden-size ffn-hidden-size num-attention-heads seq-length vocab-size mtp-num-layers "
        "global-batch-size train-iters exit-interval lr-warmup-iters eval-iters log-interval seed"
    ).split():
        parser.add_argument(f"--{flag}", type=int)
    for flag in "lr min-lr clip-grad adam-beta2 weight-decay mtp-loss-scaling-factor".split():
        parser.add_argument(f"--{flag}", type=float)
    for flag in "split tensorboard-dir save load".split():
        parser.add_argument(f"--{flag}")
    parser.add_argument("--data-path", nargs=1)
    parser.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    parser.add_argument("--lr-decay-style", default="cosine")
    parser.add_argument("--grad-norm-skip-threshold", type=float, default=inf)
    parser.add_argument("--mtp-clip-grad", type=float)
    parser.add_argument("--mtp-detach-heads", action="store_true")
    parser.add_argument("--mtp-acceptance-interval", type=int, default=1)
    # The rest of the command line chooses among things that only Megatron's trainer has.
    return task.add_arguments(parser).parse_known_args()[0]


def asked_for(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The settings that differ from their defaults: without its patch the release has no such field."""
    return {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}


def build(args: argparse.Namespace) -> tuple[Any, Any, OptimizerParamScheduler]:
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        mtp_num_layers=args.mtp_num_layers,
        mtp_loss_scaling_factor=args.mtp_loss_scaling_factor,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        attention_backend=AttnBackend.unfused,
        finalize_model_grads_func=finalize_model_grads,
        **asked_for(args, mtp_detach_heads=False, mtp_acceptance_interval=1),
    )
    transformer_engine = args.transformer_impl == "transformer_engine"
    gpt = task.build_model(config, args.vocab_size, args.seq_length, transformer_engine).cuda()
    print(f"attention: {type(gpt.decoder.layers[0].self_attention.core_attention).__name__}", flush=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta2=args.adam_beta2,
            clip_grad=args.clip_grad,
            **asked_for(args, grad_norm_skip_threshold=inf, mtp_clip_grad=None),
        ),
        [model],
    )
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


def batches(dataset: Any, size: int, first: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(first * size, len(dataset) - size + 1, size):
        samples = [dataset[index] for index in range(start, start + size)]
        yield {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def run_model(args: argparse.Namespace, model: Any, data: Iterator[Any], forward_only: bool = False) -> float:
    """One forward pass, and a backward pass unless `forward_only`. Returns the loss a token."""
    reports = get_forward_backward_func()(
        forward_step_func=task.forward_step,
        data_iterator=data,
        model=[model],
        num_microbatches=1,
        seq_length=args.seq_length,
        micro_batch_size=args.global_batch_size,
        forward_only=forward_only,
    )
    loss, n_tokens = reports[0]["lm loss"].tolist()
    return loss / n_tokens


def evaluate(args: argparse.Namespace, model: Any, dataset: Any) -> float:
    model.eval()
    data = batches(dataset, args.global_batch_size, first=0)
    with torch.no_grad():
        losses = [run_model(args, model, data, forward_only=True) for _ in range(args.eval_iters)]
    return sum(losses) / len(losses)


def train_with_core() -> None:
    args = read_flags()
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl" if torch.distributed.is_nccl_available() else "gloo")
    parallel_state.initialize_model_parallel()
    model, optimizer, scheduler = build(args)
    iteration = 0
    if args.load:
        state = torch.load(Path(args.load) / CHECKPOINT, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        iteration = state["iteration"]

    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=args.vocab_size)
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, None]
    datasets = dict(zip(Split, task.build_datasets(args, tokenizer, sizes), strict=True))
    data = batches(datasets[Split.train], args.global_batch_size, first=iteration)
    writer = SummaryWriter(args.tensorboard_dir)

    last = min(args.train_iters, args.exit_interval or args.train_iters)
    skipped = 0
    since = time.perf_counter()
    model.train()
    while iteration < last:
        iteration += 1
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = run_model(args, model, data)
        updated, grad_norm, _ = optimizer.step()
        learning_rate = optimizer.param_groups[0]["lr"]
        if updated:
            scheduler.step(increment=args.global_batch_size)
        skipped += not updated
        writer.add_scalar("lm loss", loss, iteration)
        writer.add_scalar("grad-norm", grad_norm, iteration)
        writer.add_scalar("learning-rate", learning_rate, iteration)
        MTPLossLoggingHelper.track_mtp_metrics(1.0, iteration, writer)
        for metric in training_metrics():
            if metric.tag:
                writer.add_scalar(metric.tag, float(metric.value), iteration)
        if iteration % args.log_interval == 0:
            elapsed = (time.perf_counter() - since) * 1000 / args.log_interval
            print(
                f" iteration {iteration:8d}/{args.train_iters:8d} | "
                f"elapsed time per iteration (ms): {elapsed:.1f} | learning rate: {learning_rate:.6E} | "
                f"lm loss: {loss:.6E} | grad norm: {grad_norm:.3f} | "
                f"number of skipped iterations: {skipped:3d} |" + "".join(metric.text for metric in training_metrics()),
                flush=True,
            )
            skipped, since = 0, time.perf_counter()

    if args.save:
        Path(args.save).mkdir(parents=True, exist_ok=True)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "iteration": iteration,
        }
        torch.save(state, Path(args.save) / CHECKPOINT)
    if last == args.train_iters:
        loss = evaluate(args, model, datasets[Split.valid])
        writer.add_scalar("lm loss validation", loss, iteration)
        print(f" validation loss at iteration {iteration} on validation set | lm loss value: {loss:.6E} |")
    writer.close()
