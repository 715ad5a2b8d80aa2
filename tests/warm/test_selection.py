"""Forked tests are tests like any others: chosen, counted, timed, and reported by pytest's own options."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real_process("a separate pytest runs forked tests")
THREE = """
    def test_passes():
        pass

    @pytest.mark.slow
    def test_fails():
        assert 1 == 2

    @pytest.mark.parametrize("x", ["a", "b"])
    def test_with(x):
        assert x == "a", "not this one"
"""
MARKS = ("-o", "markers=slow")


@pytest.mark.parametrize(
    "options, chosen",
    [
        ([], ["test_passes", "test_fails", "test_with[a]", "test_with[b]"]),
        (["-k", "with and not [b]"], ["test_with[a]"]),
        (["-m", "slow"], ["test_fails"]),
        (["-x"], ["test_passes", "test_fails"]),
        (["test_it.py::test_with[b]"], ["test_with[b]"]),
    ],
    ids=" ".join,
)
def test_options_choose(run_tests, options, chosen):
    run = run_tests(THREE, *MARKS, *options)
    ends = {"test_passes": "passed", "test_fails": "failed", "test_with[a]": "passed", "test_with[b]": "failed"}
    assert run.outcomes == {test: ends[test] for test in chosen} and list(run.outcomes) == chosen
    if "test_with[b]" in chosen:
        assert "FAILED test_it.py::test_with[b] - AssertionError: not this one" in run.output


def test_the_last_failed_run_again(run_tests, tmp_path):
    run_tests(THREE, *MARKS, folder=tmp_path)
    assert list(run_tests(THREE, *MARKS, "--lf", folder=tmp_path).outcomes) == ["test_fails", "test_with[b]"]


def test_the_summary_has_reasons_and_durations(run_tests):
    source = """
        def test_skips():
            pytest.skip("not today")

        def test_sleeps():
            __import__("time").sleep(1.5)
    """
    output = run_tests(source, "-rs", "--durations=1").output
    assert "SKIPPED [1] test_it.py:" in output and "not today" in output
    (line,) = [line for line in output.splitlines() if "test_sleeps" in line]
    assert float(line.split("s")[0]) >= 1.5
    assert "needs a thing" in run_tests("pytest.importorskip('no_such_module', reason='needs a thing')", "-rs").output


def test_ranks_are_forks_with_torchrun_s_variables(run_tests):
    source = """
        @pytest.mark.ranks(2, 4)
        def test_it(number_of_ranks):
            assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == str(number_of_ranks)
            assert os.environ["RANK"] == os.environ["LOCAL_RANK"] and int(os.environ["MASTER_PORT"])
            print(os.environ["RANK"] * 10)

        def test_alone(request):
            assert os.environ["WORLD_SIZE"] == "1"
            assert not request.config.pluginmanager.hasplugin("warm processes")
    """
    run = run_tests(source, "-rP")
    assert run.outcomes == {"test_alone": "passed", "test_it[2 ranks]": "passed", "test_it[4 ranks]": "passed"}
    assert run.output.count("0000000000\n") == 2 and "1111111111" not in run.output  # each captures its own


def test_each_file_has_forks_of_its_own(run_tests, tmp_path):
    source = "def test_it():\n    assert not hasattr(pytest, 'left'); pytest.left = True\n"
    (tmp_path / "test_other.py").write_text(f'import pytest\npytestmark = pytest.mark.forked("python")\n{source}')
    assert "2 passed" in run_tests(source, folder=tmp_path).output


@pytest.mark.parametrize("marks, options", [("[]", []), ('pytest.mark.forked("python")', ["--inside=python"])])
def test_without_the_mark_or_inside_a_test_runs_in_the_process_of_pytest(run_tests, marks, options):
    source = f"def test_it():\n    assert os.getppid() == {__import__('os').getpid()}"
    assert run_tests(source, *options, marks=marks).outcomes == {"test_it": "passed"}
