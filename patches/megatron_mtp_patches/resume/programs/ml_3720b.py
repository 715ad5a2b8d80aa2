"""A run with --lr 0.001 that resumes with --lr 0.0001 and --override-opt-param-scheduler."""

from ...defects.labs.lab import resume, start

EXPECTED = "a resume"


def reproduce():
    start()
    override = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    resume({"lr": 1e-3}, {"lr": 1e-4}, **override)
    return EXPECTED, EXPECTED
