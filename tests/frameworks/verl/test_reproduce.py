"""`reproduce` beside Megatron-Bridge, which changes Megatron as soon as it is imported."""

import json

import pytest

pytestmark = pytest.mark.forked("python")


def test_a_defect_is_shown_with_megatron_as_it_is_and_with_the_patches(capsys):
    """Full recomputation of heads: Bridge repairs it, too, where it is imported."""
    from megatron_mtp_patches.cli import main

    assert main(["reproduce", "ML-3457", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["with the patches"]["right"] and not report["as it is"]["right"]
