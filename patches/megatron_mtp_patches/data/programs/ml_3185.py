"""A sample of the data set for fine-tuning whose conversation is one token longer than the sequence: the tokens that
the model learns.
"""

from ...defects.labs.packing_lab import learned_tokens

NEEDS = ("megatron.training",)
CONVERSATION = [5, 6, 7, 8, 9]
EXPECTED = CONVERSATION[1:-1]
WITHOUT_CUDA = True


def reproduce():
    return EXPECTED, learned_tokens(CONVERSATION, len(CONVERSATION) - 1)
