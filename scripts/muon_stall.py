#!/usr/bin/env python3
"""The stall that NVIDIA/Megatron-LM#5394 reports: one module with very large gradients, and clipping stops all others.

    python scripts/muon_stall.py [--output DIR] [--device cpu|gpu] [--dtype bfloat16]

needs megatron-core, emerging-optimizers and matplotlib; a minute on one CPU core. A small network learns from
another one through Megatron's own ChainedOptimizer with --clip-grad 1. In each step the gradient of one of its
layers, of little use to the loss, is made RATIO times as large as that of all the others together. Prints the losses
as a table and draws them: over the steps for one ratio, and in the end for all. A bfloat16 network has float32 main
parameters, as with Megatron's --bf16.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

try:
    import emerging_optimizers  # noqa: F401
    import matplotlib
    import megatron_mtp_patches
    import torch
    from megatron_mtp_patches import rehearsal
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: this needs megatron_mtp_patches, torch, megatron-core, emerging-optimizers and matplotlib")

STEPS, LIMIT = 200, 1.0
PICTURE = "muon_stall.png"
RATIO = 1e14
RATIOS = [10.0**exponent for exponent in range(0, 17, 2)]


class Variant(NamedTuple):
    optimizer: str
    patches: str
    settings: tuple[tuple[str, float], ...]
    label: str
    colour: str


Losses = dict[tuple[Variant, float], list[float]]  # of each variant with each ratio: before each step, after the last
VARIANTS = (
    Variant("muon", "none", (), "Muon, unpatched", "#c8452f"),
    Variant("muon", "exempt-muon-from-clipping", (), "Muon, exempt from clipping", "#1f6fb2"),
    Variant("muon", "keep-newton-schulz-scale-invariant", (), "Muon, scale-invariant Newton-Schulz", "#5aa9d6"),
    Variant("adam", "none", (), "Adam, unpatched", "#8a5a00"),
    Variant(
        "adam", "floor-clip-coefficient", (("min_clip_coefficient", 1e-3),), "Adam, coefficient >= 0.001", "#c99700"
    ),
)


class Student(torch.nn.Module):
    """Three layers, and a loud one beside the second whose output counts for a thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(*size) for size in ((32, 64), (64, 64), (64, 8)))
        self.loud = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.second(hidden).tanh() + 1e-3 * self.loud(hidden))


def make_optimizer(variant: Variant, params: list[torch.nn.Parameter]) -> Any:
    """Muon for the matrices and Adam for the biases, or Adam for all, chained as Megatron chains them."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

    bf16 = params[0].dtype == torch.bfloat16
    config = OptimizerConfig(optimizer="adam", clip_grad=LIMIT, bf16=bf16, **dict(variant.settings))
    children = [torch.optim.AdamW(params, lr=5e-3, weight_decay=0.0)]
    if variant.optimizer == "muon":
        from emerging_optimizers.orthogonalized_optimizers import Muon

        matrices, biases = ([p for p in params if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
        children = [
            Muon(matrices, lr=0.02, weight_decay=0.0),
            torch.optim.AdamW(biases, lr=5e-3, weight_decay=0.0),
        ]
    if bf16:
        wrapped = [Float16OptimizerWithFloat16Params(child, config, None, lambda *_: None) for child in children]
    else:
        wrapped = [FP32Optimizer(child, config, lambda *_: None) for child in children]
    for optimizer in wrapped:
        optimizer.grad_stats_parallel_group = None
    return ChainedOptimizer(wrapped)


def train(variant: Variant, ratio: float, steps: int, dtype: torch.dtype) -> list[float]:
    """The loss before each step and after the last, as parts of the first."""
    megatron_mtp_patches.apply(variant.patches)
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    teacher, student = Student(), Student()
    with torch.no_grad():
        for param in teacher.parameters():
            param.mul_(2.0)
        target = teacher(x)
    x, student = x.to(dtype), student.to(dtype)
    params = list(student.parameters())
    others = [param for param in params if param is not student.loud.weight]
    optimizer = make_optimizer(variant, params)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1.0 - step / steps)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(student(x).float(), target)
        losses.append(loss.item())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.main_grad = grad
        size = torch.stack([param.main_grad.norm() for param in others]).norm()
        student.loud.weight.main_grad *= ratio * size / student.loud.weight.main_grad.norm()
        optimizer.step()
    losses.append(torch.nn.functional.mse_loss(student(x).float(), target).item())
    return [loss / losses[0] for loss in losses]


def draw(losses: Losses, steps: int, file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.0), constrained_layout=True)
    for variant in VARIANTS:
        style = {"color": variant.colour, "linestyle": "-" if variant.optimizer == "muon" else "--"}
        left.plot(losses[variant, RATIO], label=variant.label, **style)
        right.plot(RATIOS, [losses[variant, ratio][-1] for ratio in RATIOS], marker="o", markersize=3, **style)
    left.set(xlabel="step", ylabel="loss / loss at the start", yscale="log", ylim=(1e-5, 2.0))
    left.set_title(f"one gradient {RATIO:g} times as large as all others", fontsize=10)
    right.set(xlabel="how many times as large", ylabel=f"loss after {steps} steps / at the start")
    right.set(xscale="log", yscale="log", ylim=(1e-5, 2.0))
    right.set_title("--clip-grad 1", fontsize=10)
    right.axvline(RATIO, color="0.8", zorder=0)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def measure(steps: int = STEPS, dtype: torch.dtype = torch.float32, on_gpu: bool = False) -> Losses:
    """Train every variant with every ratio."""
    if on_gpu:
        torch.set_default_device("cuda")
    else:
        rehearsal.install(megatron_flags=False)
    from megatron.core import parallel_state

    logging.disable(logging.WARNING)
    backend = "nccl" if on_gpu else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    runs = [(variant, ratio) for variant in VARIANTS for ratio in RATIOS]
    losses = {run: train(*run, steps, dtype) for run in track(runs, "training")}
    torch.distributed.destroy_process_group()
    return losses


def compare(losses: Losses, steps: int = STEPS) -> Table:
    table = Table(
        f"loss after {steps} steps, in parts of the first",
        *(f"{ratio:g}" for ratio in RATIOS),
        title="one module's gradient, in parts of all others'",
    )
    for variant in VARIANTS:
        table.add_row(variant.label, *(f"{losses[variant, ratio][-1]:.4f}" for ratio in RATIOS))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: the GPU, if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses there, too")
    options = parser.parse_args()
    on_gpu = options.device == "gpu" if options.device else torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device gpu: torch finds no GPU here; --device cpu rehearses without one")
    losses = measure(options.steps, getattr(torch, options.dtype), on_gpu)
    Console(width=140).print(compare(losses, options.steps))
    if options.json:
        ends = {v.label: {f"{ratio:g}": losses[v, ratio][-1] for ratio in RATIOS} for v in VARIANTS}
        options.json.write_text(json.dumps({"steps": options.steps, "dtype": options.dtype, "losses": ends}, indent=1))
    options.output.mkdir(parents=True, exist_ok=True)
    draw(losses, options.steps, options.output / PICTURE)


if __name__ == "__main__":
    main()
