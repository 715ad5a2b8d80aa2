"""A step of a GPT whose parameters are gathered through the buffer of its gradients: of so many weights, how many are
the optimizer's. Biases of 16 numbers have padding there. Weights in bf16 stand for those in MXFP8.
"""

from ...defects.labs.mxfp8_lab import count_own_weights, take_first_step


def reproduce():
    model, optimizer = take_first_step(gathers_late=False)
    return count_own_weights(model, optimizer)
