"""Whether ranks that hold the same expert train it alike."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scripts.experts.conditions import WITH_REPLICAS
from scripts.experts.model import backward, make_config, make_model
from scripts.experts.norms import make_optimizer

STEPS = 3


def largest_difference(optimizer: str) -> float:
    """Train a model of the layout WITH_REPLICAS for three steps; return how far two copies of an expert are apart."""
    model = make_model(make_config(WITH_REPLICAS, has_bias=False), optimizer == "distributed optimizer")
    trainer = make_optimizer(optimizer, model)
    for step in range(STEPS):
        backward(model, step)
        trainer.step()
    apart = torch.zeros(())
    for name, param in model.named_parameters():
        if ".experts." in name:
            of_first_rank = param.detach().clone()
            dist.broadcast(of_first_rank, src=0)
            apart = apart.maximum((param - of_first_rank).abs().max().float())
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return float(apart)
