"""Forked tests are tests like any others: chosen, counted, timed, and reported by pytest's own options."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real_process("a separate pytest runs forked tests")
FOUR = """
    def test_passes():
        pass

    @pytest.mark.slow
    def test_fails():
        assert 1 == 2

    class TestGroup:
        @pytest.mark.parametrize("x", ["a", "b"])
        def test_member(self, x):
            assert x == "a", "not this one"
"""
MARKS = ("-o", "markers=slow")


def test_each_has_its_outcome(run_tests):
    run = run_tests(FOUR, *MARKS)
    outcomes = {"test_passes": "passed", "test_fails": "failed", "test_member[a]": "passed", "test_member[b]": "failed"}
    assert run.outcomes == outcomes
    assert "assert 1 == 2" in run.details["test_fails"]
    assert "FAILED test_it.py::TestGroup::test_member[b] - AssertionError: not this one" in run.output


@pytest.mark.parametrize(
    "options, chosen",
    [
        (["-k", "member and not [b]"], ["test_member[a]"]),
        (["-m", "slow"], ["test_fails"]),
        (["-x"], ["test_passes", "test_fails"]),
        (["--deselect", "test_it.py::test_fails"], ["test_passes", "test_member[a]", "test_member[b]"]),
    ],
    ids=" ".join,
)
def test_options_choose(run_tests, options, chosen):
    assert list(run_tests(FOUR, *MARKS, *options).outcomes) == chosen


@pytest.mark.parametrize(
    "name, chosen",
    [
        ("test_fails", ["test_fails"]),
        ("TestGroup", ["test_member[a]", "test_member[b]"]),
        ("TestGroup::test_member[b]", ["test_member[b]"]),
    ],
)
def test_names_choose(run_tests, tmp_path, name, chosen):
    assert list(run_tests(FOUR, *MARKS, f"{tmp_path}/test_it.py::{name}", folder=tmp_path).outcomes) == chosen


def test_the_summary_tells_why_one_was_skipped(run_tests):
    run = run_tests(
        """
        def test_skips():
            pytest.skip("not today")
    """,
        "-rs",
    )
    assert "SKIPPED [1] test_it.py:" in run.output and "not today" in run.output


def test_the_last_failed_run_again(run_tests, tmp_path):
    run_tests(FOUR, *MARKS, folder=tmp_path)
    assert list(run_tests(FOUR, *MARKS, "--lf", folder=tmp_path).outcomes) == ["test_fails", "test_member[b]"]


def test_durations_are_those_of_the_forks(run_tests):
    run = run_tests("def test_sleeps():\n        __import__('time').sleep(1.5)\n", "--durations=1")
    (line,) = [line for line in run.output.splitlines() if "test_sleeps" in line]
    assert float(line.split("s")[0]) >= 1.5


def test_ranks_are_forks_with_torchrun_s_variables(run_tests):
    source = """
        NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

        @pytest.mark.ranks(2, 4)
        def test_it(number_of_ranks):
            assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == str(number_of_ranks)
            assert os.environ["RANK"] == os.environ["LOCAL_RANK"] and int(os.environ["MASTER_PORT"])

        def test_alone():
            assert os.environ["WORLD_SIZE"] == "1"
    """
    run = run_tests(source)
    assert run.outcomes == {"test_alone": "passed", "test_it[2 ranks]": "passed", "test_it[4 ranks]": "passed"}


def test_each_file_has_forks_of_its_own(run_tests, tmp_path):
    source = "def test_it():\n    assert not hasattr(pytest, 'left'); pytest.left = True\n"
    (tmp_path / "test_other.py").write_text(f'import pytest\npytestmark = pytest.mark.forked("python")\n{source}')
    assert "2 passed" in run_tests(source, folder=tmp_path).output


def test_a_file_that_skips_itself_says_why(run_tests):
    run = run_tests("pytest.importorskip('no_such_module', reason='needs a thing')", "-rs")
    assert "needs a thing" in run.output


def test_without_the_mark_a_test_runs_in_the_process_of_pytest(run_tests):
    run = run_tests(
        "def test_it(request):\n    assert request.config.pluginmanager.hasplugin('warm processes')", head="\n"
    )
    assert run.outcomes == {"test_it": "passed"}


def test_inside_runs_forked_tests_in_the_process_of_pytest(run_tests):
    source = "def test_it(request):\n        assert not request.config.pluginmanager.hasplugin('warm processes')"
    assert run_tests(source, "--inside=python").outcomes == {"test_it": "passed"}
    assert run_tests(source).outcomes == {"test_it": "passed"}
