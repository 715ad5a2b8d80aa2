"""mcore-bridge's own models on one and two ranks."""

from ...multirank.conftest import from_all_ranks, parallel, process_group, world_size  # noqa: F401
