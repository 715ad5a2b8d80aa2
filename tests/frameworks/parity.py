"""`parity` on a framework's file, in a process that has not imported the framework."""

import json
import os
import sys
import time
from pathlib import Path

from scripts.common.forks import fork, wait

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "nvrx"


def compare(files, folder, *words, patches="none"):
    """The exit code of `parity --json --batch FILES`, and its answer for each run."""
    from megatron_mtp_patches.cli import main

    def run():
        os.environ |= {"MEGATRON_MTP_PATCHES": patches, "HF_HUB_OFFLINE": "1", "USE_HF": "1"}
        sys.path.insert(0, str(STAND_IN))
        os._exit(main(["parity", "--json", "--ranks", "2", *words, "--batch", *map(str, files)]))

    log = folder / "log"
    pid = fork(run, log)
    code = wait([pid], time.monotonic() + 550)[pid]
    text = log.read_text()
    start = f"\n{text}".find("\n{\n")
    assert start >= 0, text[-3000:]
    return code, json.loads(text[start:])["runs"]


def explanations(run):
    """{cut: the known defects that are confirmed to explain it}, of each cut that differs."""
    return {
        cut["name"]: {one["id"] for one in cut["explanations"] if one["is_confirmed"]}
        for cut in run["cuts"]
        if cut["findings"]
    }
