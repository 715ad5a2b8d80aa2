"""A step of a GPT with an expert on each of two ranks, whose parameters are gathered through the buffer of its
gradients: of so many weights, how many are the optimizer's. Weights in bf16 stand for those in MXFP8.
"""

from ...defects.labs.mxfp8_lab import count_own_weights, take_first_step

RANKS = 2


def reproduce():
    model, optimizer = take_first_step(gathers_late=False, expert_model_parallel_size=2)
    return count_own_weights(model, optimizer)
