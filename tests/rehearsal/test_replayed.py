"""What holds inside a rehearsal: one_process.py on one rank, two_ranks.py on two."""

import pytest

from .conftest import test_names as names_in


@pytest.mark.parametrize("name", names_in("one_process.py"))
def test_one_process(replay, name):
    problems = replay("one_process.py", 1)
    assert problems[name] == "", problems[name]


@pytest.mark.parametrize("name", names_in("two_ranks.py"))
def test_two_ranks(replay, name):
    problems = replay("two_ranks.py", 2)
    assert problems[name] == "", problems[name]
