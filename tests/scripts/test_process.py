"""scripts/common/process.py: what a command printed, and that nothing of it is left after its time."""

import sys

import psutil
import pytest

from scripts.common.process import environment, run, run_or_exit

pytestmark = pytest.mark.forked("python")
SLEEPS = "import time; print('ready', flush=True); time.sleep(1000)"
# A process that starts one in another session, as torchrun does, and waits with it.
FAMILY = """
import subprocess, sys
child = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"]
subprocess.run(child, start_new_session=True)
"""


def python(code, **words):
    return run([sys.executable, "-c", code], **words)


def test_the_code_and_all_that_it_printed(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    assert python("import sys; print('one'); sys.stdout.flush(); sys.exit('two')", log=log) == (1, "one\ntwo\n")
    assert log.read_text() == "before\none\ntwo\n"


def test_a_command_is_killed_when_its_time_is_up_or_it_is_to_stop(tmp_path):
    assert python(SLEEPS, timeout=0.2).code is None
    log = tmp_path / "log"
    assert python(SLEEPS, log=log, should_stop=lambda: log.read_text() == "ready\n") == (None, "ready\n")


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_command_has_started_ends_with_it(interrupted, tmp_path):
    log = tmp_path / "log"

    def should_stop():
        if interrupted and log.read_text():
            raise KeyboardInterrupt
        return bool(log.read_text())

    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            python(FAMILY, log=log, should_stop=should_stop)
    else:
        assert python(FAMILY, log=log, should_stop=should_stop).code is None
    pid = int(log.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_fails_ends_this_process_with_its_last_lines():
    with pytest.raises(SystemExit, match="the reason\n.* failed \\(exit code 3\\)"):
        run_or_exit([sys.executable, "-c", "print('the reason'); exit(3)"])
    with pytest.raises(SystemExit, match="exit code None"):
        run_or_exit([sys.executable, "-c", SLEEPS], should_stop=lambda: True)


def test_the_environment_has_this_repository_and_these_patches(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = (
        "import os, scripts, sys; print(os.environ['MEGATRON_MTP_PATCHES'], '/elsewhere' in sys.path, os.environ['A'])"
    )
    env = {**environment("none", A="b"), "PYTHONSAFEPATH": "1"}
    assert python(code, env=env, cwd="/") == (0, "none True b\n")
