"""Libraries that work on Megatron's models, under the set; one CPU rank, each library really installed."""

import megatron_mtp_patches.rehearsal.pytest_plugin  # noqa: F401  (torch.cuda must resolve to the CPU before torch users)

from ..megatron_overrides.conftest import one_rank  # noqa: F401
from ..megatron_overrides.core.transformer.multi_token_prediction.conftest import (  # noqa: F401
    batch,
    fresh_tracker,
    gradients,
    make_model,
)
