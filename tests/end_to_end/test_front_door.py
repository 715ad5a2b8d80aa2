"""The documented command line, in interpreters that torchrun starts, prints what forks of a warm process print.

All other training runs of these tests are such forks.
"""

import re

import pytest

from .conftest import HAS_TRAINER

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.real_process("a fork has imported Megatron before the patches, and has no launcher"),
]
RANKS = 2 if HAS_TRAINER else 1
FLAGS = ["--mtp-detach-heads", *(["--pipeline-model-parallel-size", "2"] if HAS_TRAINER else [])]


def test_torchrun_trains_to_the_last_digit_as_forks_do(train):
    launched, output = train(*FLAGS, ranks=RANKS, torchrun=True)
    forked, _ = train(*FLAGS, ranks=RANKS)
    assert len(launched) == 12
    assert {i: values[:3] for i, values in launched.items()} == {i: values[:3] for i, values in forked.items()}
    assert re.search(r"megatron_mtp_patches \S+: .*\b\d+ applied", output), "rank 0 logs the patches"
