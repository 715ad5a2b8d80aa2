"""--load-main-params-from-ckpt with one expert on each of two ranks and two chunks of the model, as virtual pipeline
stages have, where all weights of the checkpoint are 1 + 1/512, which has no place in bf16: the greatest and the least
main parameter.
"""

from ...defects.labs.checkpoint_lab import WEIGHT, load_main_params

RANKS = 2
EXPECTED = [WEIGHT, WEIGHT]


def reproduce():
    return EXPECTED, load_main_params(chunks=2)
