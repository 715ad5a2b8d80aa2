"""Three steps of a process with --log-interval 1, whose losses are 1, 3 and 5: the losses in the log."""

from ...defects.labs.lab import start
from ...defects.labs.trainer_lab import TrainingLog

NEEDS = ("megatron.training",)

LOSSES = [1.0, 3.0, 5.0]


def reproduce():
    import torch

    start()
    log = TrainingLog("--num-layers 2", interval=1)
    steps = enumerate(LOSSES, start=1)
    lines = [log.add_step(step, losses={"lm loss": torch.tensor([loss])}, is_first=step == 1) for step, loss in steps]
    return LOSSES, [line["lm loss"] for line in lines]
