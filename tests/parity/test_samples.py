"""The samples of a small run: those of packed sequences."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.forked("torch")
DENSE = {"create_attention_mask_in_dataloader": False, "reset_position_ids": False, "reset_attention_mask": False}


@pytest.mark.parametrize("flags", [{"sft": True}, {"sft": False, "dataloader_inter_document_masking": True}])
def test_a_packed_sample_says_where_its_sequences_end(flags):
    from megatron_mtp_patches.parity.samples import WHOLE, Samples

    samples = Samples(9, SimpleNamespace(seq_length=32, **DENSE, **flags), WHOLE, 95)
    for sample in map(samples.__getitem__, range(9)):
        ends, positions = sample["cu_seqlens"], sample["position_ids"]
        lengths = ends.diff().tolist()
        assert ends[0] == 0 and sum(lengths) == 32 and len(lengths) > 1
        assert all(length > 0 and length % 4 == 0 for length in lengths)  # as two context-parallel ranks cut them
        assert positions.tolist() == [position for length in lengths for position in range(length)]
        assert sample["max_seqlen"] == max(lengths)


def test_a_sample_of_one_sequence_has_no_ends():
    from megatron_mtp_patches.parity.samples import WHOLE, Samples

    assert "cu_seqlens" not in Samples(1, SimpleNamespace(seq_length=32, sft=False, **DENSE), WHOLE, 95)[0]
