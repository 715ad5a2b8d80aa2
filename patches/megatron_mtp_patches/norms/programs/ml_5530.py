"""The largest of no gradients, as a rank has them whose parameters are all frozen."""

from ...defects.labs.lab import start


def reproduce():
    import math

    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    start()
    return 0.0, float(get_grad_norm_fp32([], norm_type=math.inf))
