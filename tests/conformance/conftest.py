"""What the tests of each patch have in common."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def patch(request):
    """The patch of the id that a test is parametrised by."""
    from megatron_mtp_patches.catalog import CATALOG

    return next(patch for patch in CATALOG if patch.id == request.param)


@pytest.fixture
def find_affecting():
    """find_affecting(source, ..., te="2.16.1"): the known defects that affect a run, by their ids.

    A source has settings of the run by name; `te` is the version of TransformerEngine.
    """
    from megatron_mtp_patches.defects.catalog import known_defects
    from megatron_mtp_patches.doctor.findings import RunSettings

    def find(*sources, te="2.16.1"):
        settings = RunSettings([SimpleNamespace(**source) for source in sources], te)
        return {defect.id: defect for defect in known_defects() if defect.affects(settings)}

    return find
