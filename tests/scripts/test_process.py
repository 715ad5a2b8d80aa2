"""scripts/common/process.py: what a command printed, and that nothing of it is left after its time."""

import sys
import time
from pathlib import Path

import pytest

from scripts.common.process import environment, run, run_or_exit

pytestmark = pytest.mark.forked("python")
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
    lines = []
    result = python("import sys; print('one'); sys.stdout.flush(); sys.exit('two')", log=log, on_line=lines.append)
    assert result == (1, "one\ntwo\n")
    assert lines == ["one", "two"]
    assert log.read_text() == "before\none\ntwo\n"


def test_lines_arrive_while_the_command_runs():
    lines = []
    code = "import time; print('ready', flush=True); time.sleep(1000)"
    assert python(code, on_line=lines.append, should_stop=lambda: lines == ["ready"]) == (None, "ready\n")


def test_a_command_is_killed_when_its_time_is_up():
    assert python("import time; time.sleep(1000)", timeout=0.2).code is None


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_command_has_started_ends_with_it(interrupted):
    pids = []

    def should_stop():
        if interrupted and pids:
            raise KeyboardInterrupt
        return bool(pids)

    words = {"on_line": lambda line: pids.append(int(line)), "should_stop": should_stop}
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            python(FAMILY, **words)
    else:
        assert python(FAMILY, **words).code is None
    (pid,) = pids
    until = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_fails_ends_this_process_with_its_last_lines():
    with pytest.raises(SystemExit, match="the reason\n.* failed \\(exit code 3\\)"):
        run_or_exit([sys.executable, "-c", "print('the reason'); exit(3)"])
    with pytest.raises(SystemExit, match="exit code None"):
        run_or_exit([sys.executable, "-c", "import time; time.sleep(1000)"], should_stop=lambda: True)


def test_the_environment_has_this_repository_and_these_patches(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = (
        "import os, scripts, sys; print(os.environ['MEGATRON_MTP_PATCHES'], '/elsewhere' in sys.path, os.environ['A'])"
    )
    env = {**environment("none", A="b"), "PYTHONSAFEPATH": "1"}
    assert python(code, env=env, cwd="/") == (0, "none True b\n")
