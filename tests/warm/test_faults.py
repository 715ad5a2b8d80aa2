"""A test that ends its process, hangs or leaves something behind costs itself only, and is named with its rank."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real_process("a separate pytest runs forked tests")
ALONE = """
    import time, threading

    def test_killed():
        os.kill(os.getpid(), 9)

    def test_aborted():
        os.abort()

    def test_exits():
        os._exit(0)

    def test_hangs():
        wait_for_ever()

    def wait_for_ever():
        time.sleep(1000)

    def test_leaves_a_thread():
        threading.Thread(target=time.sleep, args=[1000], name="idler").start()

    def test_ends_its_thread():
        threading.Thread(target=lambda: None).start()

    def test_leaves_a_process():
        if not os.fork():
            time.sleep(1000)
        os.kill(os.getpid(), 9)

    def test_fails():
        assert 1 == 2

    def test_after():
        pass
"""
ON_TWO_RANKS = """
    import time, threading

    FIRST, SECOND = (os.environ["RANK"] == str(rank) for rank in range(2))

    def test_killed():
        SECOND and os.kill(os.getpid(), 9)

    def test_fails():
        assert FIRST

    def test_hangs():
        SECOND and time.sleep(1000)

    def test_skips():
        SECOND and pytest.skip("not here")

    def test_leaves_a_thread():
        SECOND and threading.Thread(target=time.sleep, args=[1000], name="idler").start()

    def test_after():
        pass
"""


@pytest.fixture(scope="module")
def alone(run_tests):
    return run_tests(ALONE)


@pytest.mark.parametrize(
    "test, told",
    [
        ("test_killed", "was killed by SIGKILL in test_it.py::test_killed"),
        ("test_aborted", "was killed by SIGABRT in test_it.py::test_aborted"),
        ("test_exits", "ended with exit code 0 in test_it.py::test_exits"),
        ("test_hangs", "did not end within 5 s"),
        ("test_leaves_a_process", "was killed by SIGKILL"),
        ("test_fails", "assert 1 == 2"),
    ],
)
def test_a_test_that_does_not_come_back_has_failed(alone, test, told):
    assert alone.outcomes[test] == "failed"
    assert told in alone.details[test]


def test_a_thread_left_behind_is_an_error_of_its_test(alone):
    assert alone.outcomes["test_leaves_a_thread"] == "error"
    assert "threads were left behind (rank 0: idler)" in alone.details["test_leaves_a_thread"]


def test_the_tests_between_them_pass(alone):
    assert alone.outcomes["test_ends_its_thread"] == alone.outcomes["test_after"] == "passed"
    assert len(alone.outcomes) == 9


def test_a_hanging_test_shows_where_it_is(alone):
    assert "in wait_for_ever" in alone.output


@pytest.fixture(scope="module")
def on_two_ranks(run_tests):
    marks = 'pytestmark = [pytest.mark.forked("python"), pytest.mark.ranks(2)]\n'
    return run_tests(ON_TWO_RANKS, head=f"import os, pytest\n{marks}")


@pytest.mark.parametrize(
    "test, outcome, told",
    [
        ("test_killed", "failed", "rank 1: was killed by SIGKILL"),
        ("test_fails", "failed", "rank 1: assert False"),
        ("test_hangs", "failed", "rank 1: did not end within 5 s"),
        ("test_skips", "failed", "ranks differ: rank 0 passed, rank 1 skipped"),
        ("test_leaves_a_thread", "error", "threads were left behind (rank 1: idler)"),
        ("test_after", "passed", ""),
    ],
)
def test_one_rank_of_two_is_named(on_two_ranks, test, outcome, told):
    assert on_two_ranks.outcomes[f"{test}[2 ranks]"] == outcome
    assert told in on_two_ranks.details[f"{test}[2 ranks]"]


def test_a_rank_that_waits_for_a_failed_one_is_ended(run_tests):
    source = """
        @pytest.mark.ranks(2)
        def test_it():
            assert os.environ["RANK"] == "1"
            __import__("time").sleep(1000)

        def test_after():
            pass
    """
    run = run_tests(source, "-o", "warm_limit=1000")
    assert run.outcomes == {"test_after": "passed", "test_it[2 ranks]": "failed"}
    details = run.details["test_it[2 ranks]"]
    assert "rank 1: did not end within 10 s of a failure on another rank" in details
    assert "rank 0: " in details and "assert '0' == '1'" in details


def test_a_file_that_cannot_be_collected_is_an_error(run_tests):
    run = run_tests("import no_such_module")
    assert "No module named 'no_such_module'" in run.output and "1 error" in run.output


def test_a_level_that_cannot_be_reached_is_an_error_and_names_it(run_tests):
    run = run_tests("def test_it(): pass", head='import pytest\npytestmark = pytest.mark.forked("nowhere")\n')
    assert "there is no level 'nowhere'; there are python, torch, megatron, patched" in run.output
