"""--load-main-params-from-ckpt with one expert on each of two ranks, where all weights of the checkpoint are 1 + 1/512,
which has no place in bf16: the greatest and the least main parameter.
"""

from ...defects.labs.checkpoint_lab import WEIGHT, load_main_params

RANKS = 2


def reproduce():
    return [WEIGHT, WEIGHT], load_main_params(chunks=1)
