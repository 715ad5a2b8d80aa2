"""Optimizers of every kind on seeded gradients: fp32, bf16 with main parameters, distributed, layer-wise.

A module of a main model and heads (tagged as --mtp-detach-heads leaves them) takes 20 steps of seeded gradients, which
Megatron's DDP averages over the data-parallel ranks. In some steps a norm is over its threshold.

`upstream`: what native 0.19.2 does, too. Over the threshold the main norm skips the update, and heads are clipped;
nothing is exempt from clipping.
`own`: where it deliberately does otherwise, so 0.19.2 with the patches is the reference. NaN skips. So does an infinite
norm, and the zeros are then those of the gradients (upstream first clips them all to zero). Heads have a separate limit
and threshold; if their norm exceeds it or is NaN, they alone are not updated. Muon is not clipped.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from .case import Case, describe

STEPS = 20
# With 3 layers one of four data-parallel ranks owns heads alone. Native 0.19.2 then hangs, because that rank does not
# skip with the others: hence 4.
LAYERS = {"upstream": 4, "own": 3}
SHAPES = ((16, 12), (12,), (12, 16), (16,))
CLIP, THRESHOLD = 1.0, 50.0  # norms are 2 to 4, and 1 to 2 of the heads
LARGE, SMALL = 100.0, 1e-3  # factors that take a norm over the threshold, and under the limit

KINDS = ("fp32", "bf16", "distributed", "layer_wise")
PLACEMENTS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "data": ({}, (1, 2, 4)),
    "tensor": ({"tensor_model_parallel_size": 2}, (2, 4)),
    "pipeline": ({"pipeline_model_parallel_size": 2}, (2, 4)),
}
# step: (factor of the main model's gradients, of the heads', first element of each on one data-parallel rank)
EVENTS = {
    "upstream": {4: (LARGE, 1.0, {}), 8: (1.0, LARGE, {}), 11: (SMALL, SMALL, {}), 16: (LARGE, LARGE, {})},
    "own": {
        4: (LARGE, 1.0, {}),
        6: (1.0, 1.0, {"main model": math.inf}),
        8: (1.0, LARGE, {}),
        11: (SMALL, SMALL, {}),
        13: (1.0, 1.0, {"main model": math.nan}),
        16: (1.0, 1.0, {"heads": math.nan}),
        18: (1.0, 1.0, {"heads": math.inf}),
    },
}


def cases() -> list[Case]:
    return [
        Case(f"optimizer/{kind}/{placement}/{events}", partial(run, kind, events), sizes, ranks, events == "upstream")
        for placement, (sizes, ranks) in PLACEMENTS.items()
        for kind in KINDS
        for events in EVENTS
    ]


def run(kind: str, events: str) -> dict[str, Any]:
    module = MainModelAndHeads(LAYERS[events], torch.float32 if kind == "fp32" else torch.bfloat16)
    model, optimizer = make_optimizer(kind, module, events)
    steps = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        module.give_gradients(step, *EVENTS[events].get(step, (1.0, 1.0, {})))
        model.finish_grad_sync()
        updated, norm, zeros = optimizer.step()
        heads = {group: float(value) for group, value in optimizer.grad_norms_by_group.items()}
        steps.append({"counts": {"updated": bool(updated), "zeros": zeros}, "norms": {"main": float(norm), **heads}})
    # Which rank owns which main parameter, and in which order, is the release's to say.
    main = [param.detach().float().flatten().cpu() for param in optimizer.get_parameters()]
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, torch.cat([torch.empty(0), *main]))
    return {
        "steps": steps,
        "parameters": {"main model": describe(module.main_model), "heads": describe(module.heads)},
        "main parameters, sorted": torch.cat(everyones).sort().values.tolist(),
    }


class MainModelAndHeads(torch.nn.Module):
    """This rank's part of the main model, and on the last pipeline stage a head; tensor ranks share the matrices."""

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.data_rank = parallel_state.get_data_parallel_rank()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.main_model, self.heads = (
            torch.nn.ParameterList(torch.empty(0, dtype=dtype) for _ in range(number * len(SHAPES)))
            for number in (layers, parallel_state.is_pipeline_last_stage())
        )
        for index, (part, param) in enumerate(self.parts()):
            param.data = self.draw(index, SHAPES[index % len(SHAPES)]).to(dtype).cuda()
            if param.dim() == 2:
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1
            if part == "heads":
                param.grad_norm_group = "mtp"

    def parts(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [("main model", param) for param in self.main_model] + [("heads", param) for param in self.heads]

    def draw(self, index: int, shape: tuple[int, ...], step: int = -1, data_rank: int = 0) -> torch.Tensor:
        """The same numbers on all ranks that have this parameter or, of a gradient, this part of the batch."""
        tensor_rank = self.tensor_rank if len(shape) == 2 else 0
        seed = (((step + 1) * 100 + index) * 10 + self.stage) * 10 + tensor_rank
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 10 + data_rank))

    def give_gradients(self, step: int, main_factor: float, heads_factor: float, elements: dict[str, float]) -> None:
        for index, (part, param) in enumerate(self.parts()):
            gradient = 0.1 * (heads_factor if part == "heads" else main_factor)
            gradient *= self.draw(index, param.shape, step, self.data_rank)
            gradient[self.draw(index, param.shape, step).abs() < 0.05] = 0.0
            if part in elements and self.data_rank == self.tensor_rank == 0:
                gradient.view(-1)[0] = elements[part]
            param.main_grad.copy_(gradient)


def make_optimizer(kind: str, module: MainModelAndHeads, events: str) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    settings = make_settings(kind, events)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, ddp, module)
    if kind == "layer_wise":
        return model, deal_out(list(module.parameters()), settings)
    return model, get_megatron_optimizer(settings, [model])


def make_settings(kind: str, events: str) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    bf16 = kind != "fp32"
    settings: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "bf16": bf16, "log_num_zeros_in_grad": True}
    settings |= {"params_dtype": torch.bfloat16 if bf16 else torch.float32, "clip_grad": CLIP}
    settings |= {"grad_norm_skip_threshold": THRESHOLD, "use_distributed_optimizer": kind == "distributed"}
    if events == "own":
        settings |= {"mtp_clip_grad": CLIP / 2, "mtp_grad_norm_skip_threshold": THRESHOLD / 2}
    elif "mtp_grad_norm_skip_threshold" in OptimizerConfig.__dataclass_fields__:  # native 0.19.2 lacks these two
        settings |= {"mtp_grad_norm_skip_threshold": math.inf, "clip_orthogonalizing_optimizers": True}
    return OptimizerConfig(**settings)


def deal_out(params: list[torch.nn.Parameter], settings: Any) -> Any:
    """Muon and Adam in a LayerWiseDistributedOptimizer, whose whole parameters belong to one rank each.

    By hand: 0.16.1 cannot make Muon with an emerging_optimizers that pip still installs.
    """
    from emerging_optimizers.orthogonalized_optimizers import Muon
    from megatron.core import parallel_state
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.expt_dp = parallel_state.get_expert_data_parallel_group()
    matrices, vectors = ([param for param in params if param.dim() == dims] for dims in (2, 1))
    optimizers = [
        Muon([{"params": matrices, "is_expert_parallel": False}], lr=settings.lr),
        torch.optim.AdamW([{"params": vectors, "is_expert_parallel": False}], lr=settings.lr),
    ]
    return LayerWiseDistributedOptimizer(optimizers, settings, groups)
