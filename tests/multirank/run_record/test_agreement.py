"""Megatron itself asks whether all ranks have the same patches, before it makes their process groups."""

import megatron_mtp_patches
import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]


@pytest.mark.ranks(2, 4)
def test_ranks_whose_patches_differ_get_no_process_groups(rank, from_all_ranks):
    from megatron.core import parallel_state

    if rank == 1:
        megatron_mtp_patches.apply("none")
    try:
        with pytest.raises(megatron_mtp_patches.PatchError, match="ranks differ"):
            parallel_state.initialize_model_parallel()
    finally:
        megatron_mtp_patches.apply()
        from_all_ranks(None)
