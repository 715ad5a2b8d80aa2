"""verify-mtp with TransformerEngine's layers; test_golden.py compares the numbers of their training."""

import re

import pytest
from megatron_mtp_patches import rehearsal

from .test_training import needs_trainer

pytestmark = [
    pytest.mark.forked("patched"),
    needs_trainer,
    pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed"),
]


def test_verification_finds_detached_heads_alone(train):
    flags = ["--mtp-detach-heads", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    _, output = train(*flags, "--transformer-impl", "transformer_engine", ranks=2, command="verify-mtp")
    assert re.search(r"TransformerEngine [\d.]+ with its kernels in torch", output)
    assert re.search(r"verify-mtp: the MTP loss has reached \d+ parameters of the heads and nothing else", output)
