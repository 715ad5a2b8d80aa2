"""A save after the first step of a GPT whose parameters are gathered through the buffer of its gradients: of so many
weights, how many are the optimizer's. Weights in bf16 stand for those in MXFP8.
"""

from ...defects.labs.mxfp8_lab import count_own_weights, gather_for_save, take_first_step


def reproduce():
    model, optimizer = take_first_step(gathers_late=True)
    gather_for_save(model, optimizer)
    return count_own_weights(model, optimizer)
