"""The networks of muon.py: a small one learns from another one through Megatron's own ChainedOptimizer."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import megatron_mtp_patches
import torch
from megatron_mtp_patches import rehearsal

LIMIT = 1.0  # --clip-grad
RATIO = 1e14
RATIOS = [10.0**exponent for exponent in range(0, 17, 2)]


class Variant(NamedTuple):
    optimizer: str
    patches: str
    label: str
    colour: str
    min_clip_coefficient: float | None = None


Losses = dict[tuple[Variant, float], list[float]]  # of each variant with each ratio: before each step, after the last
VARIANTS = (
    Variant("muon", "none", "Muon, unpatched", "#c8452f"),
    Variant("muon", "exempt-muon-from-clipping", "Muon, exempt from clipping", "#1f6fb2"),
    Variant("muon", "keep-newton-schulz-scale-invariant", "Muon, scale-invariant Newton-Schulz", "#5aa9d6"),
    Variant("adam", "none", "Adam, unpatched", "#8a5a00"),
    Variant("adam", "floor-clip-coefficient", "Adam, coefficient >= 0.001", "#c99700", 1e-3),
)


class Student(torch.nn.Module):
    """Three layers, and one beside the second whose output counts for a thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(*size) for size in ((32, 64), (64, 64), (64, 8)))
        self.beside = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.second(hidden).tanh() + 1e-3 * self.beside(hidden))


def make_optimizer(variant: Variant, params: list[torch.nn.Parameter]) -> Any:
    """Muon for the matrices and Adam for the biases, or Adam for all, chained as Megatron chains them."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

    bf16 = params[0].dtype == torch.bfloat16
    floor = variant.min_clip_coefficient
    settings = {} if floor is None else {"min_clip_coefficient": floor}
    config = OptimizerConfig(optimizer="adam", clip_grad=LIMIT, bf16=bf16, **settings)
    children = [torch.optim.AdamW(params, lr=5e-3, weight_decay=0.0)]
    if variant.optimizer == "muon":
        from emerging_optimizers.orthogonalized_optimizers import Muon

        matrices, biases = ([p for p in params if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
        adam = torch.optim.AdamW(biases, lr=5e-3, weight_decay=0.0)
        children = [Muon(matrices, lr=0.02, weight_decay=0.0), adam]
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
    others = [param for param in params if param is not student.beside.weight]
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
        student.beside.weight.main_grad *= ratio * size / student.beside.weight.main_grad.norm()
        optimizer.step()
    losses.append(torch.nn.functional.mse_loss(student(x).float(), target).item())
    return [loss / losses[0] for loss in losses]


def measure(steps: int, dtype: str = "float32", on_gpu: bool = False) -> Losses:
    """Train every variant with every ratio."""
    if on_gpu:
        torch.set_default_device("cuda")
    else:
        rehearsal.install(megatron_flags=False)
    from megatron.core import parallel_state
    from rich.progress import track

    logging.disable(logging.WARNING)
    backend = "nccl" if on_gpu else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    runs = [(variant, ratio) for variant in VARIANTS for ratio in RATIOS]
    losses = {run: train(*run, steps, getattr(torch, dtype)) for run in track(runs, "training")}
    torch.distributed.destroy_process_group()
    return losses
