"""`parity --resume`: a resume that a known defect spoils, and with which patches it goes on as the run did."""

import pytest

from .test_parity import DENSE, OPTIONS

pytestmark = pytest.mark.forked("torch")
pytest.importorskip("megatron.training", reason="the 0.16.1 wheel has no megatron.training")
# All buckets but the first one are shifted in the checkpoint: ML-5077.
RESHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1000 --dist-ckpt-optim-fully-reshardable"
)


def test_a_checkpoint_of_shifted_buckets_is_explained_and_equal_with_the_patches(parity):
    code, answer = parity(*OPTIONS, "--resume", "--cut", "DP2", "--", *f"{DENSE} {RESHARDED}".split(), patches="none")
    assert code == 1, answer
    tried = [(one["saved"], one["loaded"]) for one in answer["resumes"]]
    assert tried == [("one rank", "one rank"), ("DP2", "DP2"), ("one rank", "DP2"), ("DP2", "one rank")]
    for one in answer["resumes"]:
        assert not one["refused"] and one["goes_away"], one
        assert one["deviations"][0].startswith("update "), one["deviations"][0]
        assert one["explanations"][0]["id"] == "ML-5077"
