"""The command `parity`, in a fork."""

import json
import os
import time

import pytest

from scripts.common.forks import fork, wait


@pytest.fixture
def parity(tmp_path):
    """parity(*words, patches): the exit code, and what the command has printed, as JSON where it is."""
    from megatron_mtp_patches.cli import main

    def run(*words, patches="all"):
        os.environ["MEGATRON_MTP_PATCHES"] = patches
        log = tmp_path / "log"
        pid = fork(lambda: os._exit(main(["parity", *words])), log)
        code = wait([pid], time.monotonic() + 300)[pid]
        text = log.read_text()
        start = f"\n{text}".find("\n{\n")
        return code, text if start < 0 else json.loads(text[start:])

    return run
