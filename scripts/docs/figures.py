"""Two figures for docs/: heads that learn without labels, and heads whose loss has a separate scale.

    python -m megatron_mtp_patches run --device cpu scripts/docs/figures.py DATA OUTPUT

DATA is a dataset's prefix, as `python -m scripts.demo.dataset` writes it, OUTPUT a folder; half a minute. The
repository's root must be on PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from scripts.common.pictures import BLUE, RED, YELLOW, save, start
from scripts.demo.trainer import be_one_process
from scripts.tiny_gpt import build_gpt, causal_inputs, make_config, run_microbatches, start_process_groups

STEPS, LENGTH, BATCH = 150, 64, 16


class Writer:
    """Keeps the scalars of the last step."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name] = float(value)


def train(data: torch.Tensor, with_labels: bool, scale: float | None = None) -> list[dict[str, float]]:
    """A small GPT with one detached head; without labels the script makes its own loss of the logits, as in RL."""
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    config = make_config(
        hidden_size=64,
        mtp_num_layers=1,
        mtp_detach_heads=True,
        finalize_model_grads_func=finalize_model_grads,
        mtp_grad_scale_func=None if scale is None else lambda: scale,
    )
    ddp = DistributedDataParallelConfig()
    model = DistributedDataParallel(config, ddp, build_gpt(config, 256, LENGTH).cuda())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0), [model])
    generator = torch.Generator().manual_seed(9)

    def forward_step(_: Any, model: Any) -> tuple[torch.Tensor, Callable]:
        starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
        tokens = torch.stack([data[start : start + LENGTH + 1] for start in starts]).cuda()
        inputs, positions, _, targets = causal_inputs(tokens)
        output = model(inputs, positions, None, labels=targets if with_labels else None)

        def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict]:
            if with_labels:
                return output.float().mean(), {}
            return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), targets.flatten()), {}

        return output, loss_function

    steps = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run_microbatches(model, forward_step, 1, LENGTH, BATCH)
        optimizer.step()
        writer = Writer()
        MTPLossLoggingHelper.track_mtp_metrics(1.0, step, writer)
        steps.append({**writer.scalars, "norm": float(getattr(optimizer, "mtp_grad_norm", None) or 0.0)})
    MTPLossLoggingHelper.tracker = {}
    return steps


def draw(path: Path, title: str, name: str, ylabel: str, runs: dict[str, list[dict[str, float]]]) -> None:
    figure, (axes,) = start("", [title], 1, (7.5, 3.4))
    for (label, steps), colour, style in zip(runs.items(), (BLUE, YELLOW, RED), ("-", "--", "-"), strict=False):
        axes.plot([step.get(name, float("nan")) for step in steps], style, color=colour, label=label)
    axes.set(xlabel="step", ylabel=ylabel, yscale="log" if name == "norm" else "linear")
    figure.legend(frameon=False, fontsize=9, ncols=len(runs), loc="outside lower center")
    save(figure, path)


def main() -> None:
    prefix, output = Path(sys.argv[1]), Path(sys.argv[2])
    be_one_process()
    start_process_groups()
    data = torch.frombuffer(bytearray(Path(f"{prefix}.bin").read_bytes()[: 1 << 22]), dtype=torch.uint8).long()
    labels = {"labels given": train(data, True), "labels=None": train(data, False)}
    title = "A head learns from the tokens what it learns from labels"
    draw(output / "labels_from_tokens.png", title, "mtp_1_acceptance_rate", "acceptance rate, %", labels)
    scales = {f"scale {scale:g}": train(data, True, scale) for scale in (0.1, 1.0, 10.0)}
    title = "mtp_grad_scale_func: a separate scale for the MTP loss"
    draw(output / "mtp_loss_scale.png", title, "norm", "gradient norm of the head", scales)


if __name__ == "__main__":
    main()
