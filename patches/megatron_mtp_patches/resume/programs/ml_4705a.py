"""A run with --lr 0.001 and --decoupled-lr 0.0001 that resumes: the learning rates of its parameter groups."""

from ...defects.labs.lab import resume, start


def reproduce():
    start()
    settings = {"lr": 1e-3, "decoupled_lr": 1e-4}
    return resume(settings, settings)
