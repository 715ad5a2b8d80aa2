"""Training of a small GPT with two MTP heads, on one rank: 50 steps of two microbatches, Adam, clipped.

bf16 is with the distributed optimizer. No threshold: native 0.19.2 is the reference of all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .case import Case, describe

STEPS, VOCABULARY, LENGTH, BATCH, CLIP = 50, 64, 32, 4, 0.25
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "detached": {"mtp_detach_heads": True},
    "attached": {},
    "per_token": {"mtp_detach_heads": True, "calculate_per_token_loss": True},
    "recompute": {"mtp_detach_heads": True, **RECOMPUTE},
}
WEIGHS = (
    "weighs the MTP loss differently with --calculate-per-token-loss, and keeps doing so; the main model is bitwise"
)
DIFFERS = {"per_token": {"0.16.1": (WEIGHS, ["mtp", "correct", "heads"])}}


def cases() -> list[Case]:
    return [
        Case(f"model/{layout}/{precision}", partial(run, layout, precision == "bf16"), differs=DIFFERS.get(layout, {}))
        for layout in LAYOUTS
        for precision in ("fp32", "bf16")
    ]


def run(layout: str, bf16: bool) -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}
    gpt, model, optimizer = make_training(LAYOUTS[layout], bf16)
    generator = torch.Generator().manual_seed(7)
    steps = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(model, generator)
        tracker = MTPLossLoggingHelper.tracker
        counts = {key: tracker[f"{key}_values"].tolist() for key in ("correct", "total")}
        mtp_losses = (tracker["loss_values"] / 2).tolist()
        MTPLossLoggingHelper.track_mtp_metrics(0.5, 1, None)
        updated, norm, _ = optimizer.step()
        groups = {group: float(value) for group, value in optimizer.grad_norms_by_group.items()}
        norms = {"main": float(norm), **groups}
        factors = {group: min(1.0, CLIP / (value + 1e-6)) for group, value in norms.items()}
        steps.append(
            {
                "losses": {"main": losses, "mtp": mtp_losses},
                "norms": norms,
                "clip factors": factors,
                "counts": {"updated": bool(updated), **counts},
            }
        )
    main_model = [param for name, param in gpt.named_parameters() if not name.startswith("mtp.")]
    return {
        "steps": steps,
        "parameters": {"main model": describe(main_model), "heads": describe(gpt.mtp.parameters())},
    }


def make_training(layout: dict[str, Any], bf16: bool) -> tuple[Any, Any, Any]:
    """Return a seeded GPT, the same GPT in Megatron's DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from scripts.tiny_gpt import build_gpt, make_config

    dtype = torch.bfloat16 if bf16 else torch.float32
    heads = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, "finalize_model_grads_func": finalize_model_grads}
    config = make_config(hidden_size=32, bf16=bf16, params_dtype=dtype, **heads, **layout)
    gpt = build_gpt(config, VOCABULARY, LENGTH, tied=False).cuda().to(dtype)
    fill(gpt)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=bf16), gpt)
    settings = OptimizerConfig(
        optimizer="adam", lr=3e-3, clip_grad=CLIP, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=bf16
    )
    config.grad_scale_func = None
    return gpt, model, get_megatron_optimizer(settings, [model])


def fill(model: Any) -> None:
    """Fill the model with the same numbers on every release; releases initialise it differently."""
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            param.data.copy_(0.05 * torch.randn(param.shape, generator=generator))
        else:
            param.data.fill_(float(name.endswith("weight")))


def forward_backward(model: Any, generator: torch.Generator) -> list[float]:
    """Compute the gradients of two seeded microbatches; return their losses."""
    from scripts.tiny_gpt import causal_inputs, run_microbatches

    losses = []

    def forward_step(data: Any, model: Any) -> Any:
        tokens = torch.randint(0, 8, (BATCH, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
        weights = (torch.rand(BATCH, LENGTH, generator=generator) > 0.1).float().cuda()
        *inputs, labels = causal_inputs(tokens.cuda())
        output = model(*inputs, labels=labels, loss_mask=weights)

        def loss_function(output: torch.Tensor) -> tuple:
            loss = (output.float() * weights).sum()
            losses.append(float(loss.detach() / weights.sum()))
            return loss, weights.sum().to(torch.int), {}

        return output, loss_function

    run_microbatches(model, forward_step, 2, LENGTH, BATCH)
    return losses
