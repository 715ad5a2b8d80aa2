"""What the tests of each patch have in common."""

from __future__ import annotations

import pytest


@pytest.fixture
def patch(request):
    """The patch of the id that a test is parametrised by."""
    from megatron_mtp_patches.catalog import CATALOG

    return next(patch for patch in CATALOG if patch.id == request.param)
