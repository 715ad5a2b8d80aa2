"""A step in which one gradient is NaN, with --grad-norm-skip-threshold 1: it should be skipped."""

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, start

EXPECTED = "skipped"


def reproduce():
    import torch

    start()
    config = make_config()
    model = make_ddp(config, make_gpt(config))
    optimizer = make_optimizer(model, grad_norm_skip_threshold=1.0)
    for param in model.parameters():
        param.main_grad.fill_(0.01)
    next(model.parameters()).main_grad.view(-1)[0] = torch.nan
    updated, _, _ = optimizer.step()
    return EXPECTED, "taken" if updated else "skipped"
