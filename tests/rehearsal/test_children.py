"""A process that a rehearsal starts is a rehearsal as soon as it imports torch."""

import multiprocessing

import pytest

from tests.rehearsal import spawned

pytestmark = pytest.mark.forked("torch")


@pytest.mark.real_process("a spawned process imports all that it needs")
def test_the_layers_come_with_torch_and_no_patches():
    mine, its = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=spawned.report, args=(its,))
    process.start()
    its.close()  # so that recv() ends if the process dies
    assert mine.recv() == ([], "cpu", True, False)
    process.join()
