"""Megatron-Bridge, imported once for the runs of a file."""

import sys

import pytest

from tests.pages import ROOT


@pytest.fixture(scope="session")
def bridge():
    """Import, with the patches and in a rehearsal, what each run imports: runs are forks of this process."""
    import megatron_mtp_patches
    from megatron_mtp_patches import rehearsal

    rehearsal.install()
    megatron_mtp_patches.apply()
    sys.path.insert(0, str(ROOT / "tests" / "stand_ins" / "nvrx"))
    import megatron.bridge.training.pretrain
    import transformers  # noqa: F401

    return megatron.bridge
