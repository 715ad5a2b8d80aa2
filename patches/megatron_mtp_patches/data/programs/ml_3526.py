"""A sample of the data set for fine-tuning with a conversation whose template has no end-of-document token: the tokens
that the model learns.
"""

from ...defects.labs.packing_lab import learned_tokens

NEEDS = ("megatron.training",)
CONVERSATION = [5, 6, 7, 8, 9]
WITHOUT_CUDA = True


def reproduce():
    return CONVERSATION[1:], learned_tokens(CONVERSATION, 8)
