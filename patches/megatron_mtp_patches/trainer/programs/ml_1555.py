"""The losses in the log of a step of which one is 1 and the other 0."""

from ...defects.labs.lab import start
from ...defects.labs.trainer_lab import TrainingLog

NEEDS = ("megatron.training",)
LOSSES = {"lm loss": 1.0, "load_balancing_loss": 0.0}


def reproduce():
    import torch

    start()
    losses = {name: torch.tensor([loss]) for name, loss in LOSSES.items()}
    line = TrainingLog("--num-layers 2").add_step(1, losses=losses)
    return list(LOSSES), [name for name in LOSSES if name in line]
