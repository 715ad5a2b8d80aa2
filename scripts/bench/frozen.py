"""What heads cost that train alone, or that do not train, beside detached heads: seconds, FLOPs and bytes of a step.

    python -m scripts.bench frozen [--kind disabled] [--out ci/frozen]

No GPU is needed.

One process trains a GPT with one MTP head in both ways, in turns. FLOPs are those of the matrix products that torch
counts. Run it alone. Needs torch and megatron-core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.markdown import Table
from scripts.common.process import ROOT

LAYERS, HIDDEN, LENGTH, VOCABULARY = 8, 256, 256, 512
WARM_UP, ROUNDS = 3, 15  # steps of each kind
DETACHED = "detached"
KINDS = {"frozen": {"freeze_base_model_for_mtp": True}, "disabled": {"disable_mtp_loss": True}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", choices=KINDS, default="frozen", help="whether the main model is frozen or heads do not run"
    )
    parser.add_argument("--out", type=Path, help="folder of the table (default: ci/KIND)")


def run(options: argparse.Namespace) -> None:
    import torch

    study.rehearse()
    torch.set_num_threads(1)
    kinds = {DETACHED: {"mtp_detach_heads": True}, options.kind: KINDS[options.kind]}
    trainings = {kind: Training(**settings) for kind, settings in kinds.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(WARM_UP + ROUNDS):
        for kind, training in trainings.items():
            start = time.perf_counter()
            training.step()
            if number >= WARM_UP:
                seconds[kind].append(time.perf_counter() - start)
    costs = {kind: training.count() for kind, training in trainings.items()}
    for kind, times in seconds.items():
        costs[kind]["milliseconds"] = 1000 * statistics.median(times)
    elements = trainings[options.kind].trained_elements
    theory = {"bytes of gradients": 4 * elements, "bytes of optimizer state": 8 * elements}
    folder = options.out or ROOT / "ci" / options.kind
    study.keep(folder, make_table(options.kind, costs, theory), {"found": costs, "theory": theory})
    torch.distributed.destroy_process_group()


class Training:
    """A GPT with one head, Megatron's DDP and Adam in fp32."""

    def __init__(self, **settings: Any) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from scripts.tiny_gpt import build_gpt, causal_inputs, make_config

        model_parallel_cuda_manual_seed(1)
        config = make_config(num_layers=LAYERS, hidden_size=HIDDEN, mtp_num_layers=1, **settings)
        gpt = build_gpt(config, VOCABULARY, LENGTH, tied=False)
        self.trained_elements = sum(param.numel() for param in gpt.parameters() if param.requires_grad)
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [self.model])
        tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        *self.inputs, self.labels = causal_inputs(tokens)

    def step(self) -> None:
        """Train on the one batch."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._forward().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()

    def count(self) -> dict[str, float]:
        """Return FLOPs and bytes by name."""
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from scripts.bench.held import state_bytes

        with FlopCounterMode(display=False) as counter:
            self.step()
        activations: dict[int, int] = {}
        own = {param.untyped_storage().data_ptr() for param in self.model.parameters()}

        def keep_tensor(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                activations[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep_tensor, lambda tensor: tensor):
            loss = self._forward()
        del loss
        buffers = [*self.model.buffers, *self.model.expert_parallel_buffers]
        return {
            "GFLOPs of the matrix products": counter.get_total_flops() / 1e9,
            "bytes of gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "bytes of optimizer state": state_bytes(self.optimizer),
            "bytes of activations kept for backward": sum(activations.values()),
        }

    def _forward(self) -> Any:
        return self.model(*self.inputs, labels=self.labels).mean()


def columns(kind: str) -> list[str]:
    return ["of a step", DETACHED, kind, f"{kind} / {DETACHED}", f"{kind}, in theory"]


def rows(kind: str, costs: dict[str, dict[str, float]], theory: dict[str, int]) -> list[list[str]]:
    """Detached heads and those of this kind side by side."""
    cells = []
    for what, cost in costs[kind].items():
        detached = costs[DETACHED][what]
        numbers = [f"{number:,.1f}" if isinstance(number, float) else f"{number:,}" for number in (detached, cost)]
        cells.append([what, *numbers, f"{cost / detached:.2f}", f"{theory[what]:,}" if what in theory else ""])
    return cells


def make_table(kind: str, costs: dict[str, dict[str, float]], theory: dict[str, int]) -> Table:
    flag = "" if kind == "frozen" else f" --kind {kind}"
    note = (
        f"One step of a GPT with {LAYERS} layers and one MTP head: hidden size {HIDDEN}, {LENGTH} tokens, vocabulary "
        f"{VOCABULARY}, fp32, one core, medians. In theory: four bytes for the gradient of each parameter that trains, "
        f"eight for Adam's moments; torch also counts the steps of each tensor in four bytes. Made by "
        f"`python -m scripts.bench frozen{flag}` with {study.made_with()} on a CPU."
    )
    title = "The price of heads that train alone" if kind == "frozen" else "The price of heads that do not train"
    return Table(title, columns(kind), rows(kind, costs, theory), range(1, 5), note=note)
