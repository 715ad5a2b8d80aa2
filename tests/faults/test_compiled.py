"""torch.compile gives what plain Python gives, to the bit."""

from __future__ import annotations

import pytest

SCENARIO = "patched"


@pytest.mark.parametrize("heads", ["attached", "detached"])
def test_a_compiled_mtp_loss_is_the_same(found, heads):
    assert found[heads]["same"] == [True] * 4
    assert found[heads]["gradient"] > 0


@pytest.mark.parametrize("heads", ["attached", "detached"])
def test_something_was_compiled(found, heads):
    assert found[heads]["frames"] > 0 and found[heads]["calls"] > 10
