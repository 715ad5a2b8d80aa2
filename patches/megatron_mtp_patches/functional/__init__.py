"""The computations of the patches as functions, for trainers that neither use Megatron's loop nor want it patched.

Each function does what the patched Megatron does, to the bit, and needs no patch: with MEGATRON_MTP_PATCHES=none in the
environment the import leaves Megatron as it is. Torch and Megatron are imported when a function is called.
"""

from .heads import acceptance, mtp_loss, roll
from .norms import clip, decide, grad_norms, is_mtp_parameter, tag, update

__all__ = ["acceptance", "clip", "decide", "grad_norms", "is_mtp_parameter", "mtp_loss", "roll", "tag", "update"]
