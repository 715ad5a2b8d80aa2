"""A test that ends its process, hangs or leaves something behind costs itself only, and is named with its rank."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real_process("a separate pytest runs forked tests")
SOURCE = """
    import time, threading

    def is_last():
        return os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def test_killed():
        is_last() and os.kill(os.getpid(), 9)

    def test_exits():
        is_last() and os._exit(0)

    def test_hangs():
        is_last() and wait_for_ever()

    def wait_for_ever():
        time.sleep(1000)

    def test_leaves_a_thread():
        is_last() and threading.Thread(target=time.sleep, args=[1000], name="idler").start()

    def test_ends_its_thread():
        threading.Thread(target=lambda: None).start()

    def test_leaves_a_process():
        if not os.fork():
            time.sleep(1000)
        is_last() and os.kill(os.getpid(), 9)

    def test_fails():
        assert not is_last()

    def test_skips():
        is_last() and pytest.skip("not here")

    def test_passes():
        pass
"""
ENDS = {
    "test_killed": ("failed", "was killed by SIGKILL"),
    "test_exits": ("failed", "ended with exit code 0"),
    "test_hangs": ("failed", "did not end within 7 s"),
    "test_leaves_a_thread": ("error", "threads were left behind: idler"),
    "test_ends_its_thread": ("passed", ""),
    "test_leaves_a_process": ("failed", "was killed by SIGKILL"),
    "test_passes": ("passed", ""),
}


def test_alone(run_tests):
    run = run_tests(SOURCE)
    for test, (outcome, text) in {**ENDS, "test_skips": ("skipped", "not here")}.items():
        assert run.outcomes[test] == outcome and text in run.details[test], run.output
    assert "assert not True" in run.details["test_fails"]
    assert "in wait_for_ever" in run.output


def test_one_rank_of_two_is_named(run_tests):
    run = run_tests(SOURCE, marks='[pytest.mark.forked("python"), pytest.mark.ranks(2)]')
    ends = {test: (outcome, text and f"rank 1: {text}") for test, (outcome, text) in ENDS.items()}
    ends["test_leaves_a_thread"] = ("error", "rank 1: Failed: threads were left behind: idler")
    ends["test_fails"] = ("failed", "rank 1: assert not True")
    ends["test_skips"] = ("failed", "ranks differ: rank 0 passed, rank 1 skipped")
    for test, (outcome, text) in ends.items():
        assert run.outcomes[f"{test}[2 ranks]"] == outcome and text in run.details[f"{test}[2 ranks]"], run.output
    assert run.outcomes.keys() == {f"{test}[2 ranks]" for test in ends}


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
    assert "in test_it" in run.output.partition("printed by rank 1")[2]


@pytest.mark.parametrize(
    "source, marks, text",
    [
        ("import no_such_module", 'pytest.mark.forked("python")', "No module named 'no_such_module'"),
        ("os._exit(3)", 'pytest.mark.forked("python")', "ERROR test_it.py"),
        (
            "",
            'pytest.mark.forked("nowhere")',
            "there is no level 'nowhere'; there are python, torch, megatron, patched",
        ),
    ],
)
def test_a_file_that_cannot_be_collected_is_an_error(run_tests, source, marks, text):
    run = run_tests(source, marks=marks)
    assert text in run.output and "1 error" in run.output
