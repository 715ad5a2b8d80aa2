"""Libraries that work on Megatron's models, with the patches; one CPU rank, each library is really installed."""

from ..megatron_overrides.conftest import one_rank  # noqa: F401
from ..megatron_overrides.mtp.conftest import (  # noqa: F401
    batch,
    fresh_tracker,
    gradients,
    make_model,
)
