"""`parity --resume`: resumes that known defects spoil or end, and with which patches they go on as the run did."""

import pytest
from megatron_mtp_patches.cli.resume_output import describe_resume, show_resume
from megatron_mtp_patches.parity.comparison import Deviation
from megatron_mtp_patches.parity.cuts import Cut
from megatron_mtp_patches.parity.legitimate import DEPENDENCES
from megatron_mtp_patches.parity.processes import prepare
from megatron_mtp_patches.parity.resume import Resume, try_resumes
from megatron_mtp_patches.parity.small import shrink
from megatron_mtp_patches.parity.study import Study

from .test_parity import DENSE, OPTIONS, SCRIPT

pytestmark = pytest.mark.forked("torch")
pytest.importorskip("megatron.training", reason="the 0.16.1 wheel has no megatron.training")
# All buckets but the first one are shifted in the checkpoint: ML-5077.
RESHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1000 --dist-ckpt-optim-fully-reshardable"
)
REMAINDERS = "--use-distributed-optimizer --use-precision-aware-optimizer --dist-ckpt-optim-fully-reshardable"


def test_a_checkpoint_of_shifted_buckets_is_explained_and_equal_with_the_patches(parity, request):
    """On one rank; with --everywhere on two and from one to the other as well."""
    cut = "DP2" if request.config.getoption("everywhere") else "one rank"
    code, answer = parity(*OPTIONS, "--resume", "--cut", cut, "--", *f"{DENSE} {RESHARDED}".split(), patches="none")
    assert code == 1, answer
    pairs = [("one rank", "one rank"), ("DP2", "DP2"), ("one rank", "DP2"), ("DP2", "one rank")]
    assert [(one["saved"], one["loaded"]) for one in answer["resumes"]] == pairs[: 4 if cut == "DP2" else 1]
    for one in answer["resumes"]:
        assert not one["refused"] and one["goes_away"], one
        assert one["deviations"][0].startswith("update "), one["deviations"][0]
        assert one["explanations"][0]["id"] == "ML-5077"


def test_a_resume_that_a_known_defect_ends_is_explained():
    pytest.importorskip("transformer_engine", reason="its optimizer has the remainders of weights: ML-4222")
    prepare(str(SCRIPT))
    study = Study(str(SCRIPT), shrink(f"{DENSE} {REMAINDERS}".split(), "bf16"), "uneven")
    (one,) = try_resumes(study, [])
    assert one.saved.name == one.loaded.name == "one rank"
    assert one.refusal.startswith("AssertionError: assert unscaled_state.dtype == torch.int16")
    assert "ML-4222" in [defect.id for defect in one.explanations]
    assert one.deviations == [] and one.goes_away is False


def test_what_megatron_defines_by_layout_is_said():
    (zeros,) = (one for one in DEPENDENCES if "exactly" in one.reason)
    resume = Resume(Cut("one rank", 1, ()), Cut("TP2", 2, ()), dependences={zeros: [Deviation(1, "log", "zeros", 0.5)]})
    lines = []
    show_resume(lambda line, **_: lines.append(line), resume)
    assert lines == [
        "saved on one rank, resumed on TP2 (0.0 s): goes on as the run that was not interrupted, but for what Megatron "
        "defines by layout",
        f"    as Megatron defines it: {zeros.reason} (log zeros: 0.5)",
    ]
    assert describe_resume(resume)["as_defined"] == [zeros.reason]
