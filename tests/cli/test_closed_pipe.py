"""A command whose output nobody reads any more ends without a traceback, as a program that SIGPIPE ends."""

import os
import signal
import sys

import pytest
from megatron_mtp_patches.cli import main

from .fresh_start import run_python

pytestmark = pytest.mark.forked("patched")

# What the process does before it becomes the command.
CLOSE_PIPE = (
    "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def test_it_ends_as_by_the_signal(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["explain", "roll-padded-packed-sequences"]) == 128 + signal.SIGPIPE
        print("nothing is raised any more", flush=True)


def test_a_process_that_prints_little_ends_without_a_word():
    done = run_python("-c", CLOSE_PIPE, sys.executable, "-m", "megatron_mtp_patches", "explain", "ML-5047")
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_broken_pipe_of_a_script_is_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise BrokenPipeError('of a socket')\n")
    with pytest.raises(BrokenPipeError, match="of a socket"):
        main(["run", str(script)])
