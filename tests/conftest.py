"""What tests of the applied set have in common."""

from contextlib import contextmanager

import pytest


@pytest.fixture
def unpatched():
    """with unpatched(): Megatron as it is without the set."""
    import megatron_mtp_patches

    @contextmanager
    def revert():
        megatron_mtp_patches.revert()
        try:
            yield
        finally:
            megatron_mtp_patches.apply()

    return revert
