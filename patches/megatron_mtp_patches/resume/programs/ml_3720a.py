"""A run with --lr 0.001 that resumes with --lr 0.0001 and --override-opt-param-scheduler: its learning rate."""

from ...defects.labs.lab import resume, start


def reproduce():
    start()
    override = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    try:
        _, seen = resume({"lr": 1e-3}, {"lr": 1e-4}, **override)
    except KeyError:  # ML-3720b
        return "not the checkpoint's", "not the checkpoint's"
    return 1e-4, max(seen)
