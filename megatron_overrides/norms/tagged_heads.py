"""Tag the parameters of the MTP heads, so that the optimizer can clip them separately.

NVIDIA/Megatron-LM#4116. The tag is `grad_norm_group = "mtp"`; the original pull request calls it `is_mtp_param`, which
is set as well.
"""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.norms.norm_tags import tag_mtp_block


def tag_block(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__: tags the parameters of the new block."""
    call.proceed()
    tag_mtp_block(call.instance)
