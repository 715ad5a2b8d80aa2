"""A process that a rehearsal starts is a rehearsal as soon as it imports torch."""

import pytest

from tests.rehearsal import spawned

pytestmark = pytest.mark.forked("torch")


@pytest.mark.real_process("a spawned process imports all that it needs")
def test_the_layers_come_with_torch_and_no_patches():
    assert spawned.ask("torch") == ([], ["torch"], "cpu")
