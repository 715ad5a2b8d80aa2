"""The wheel where there is neither torch nor Megatron: the command says what is missing, without a traceback."""

from __future__ import annotations

import json

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("runs in an environment with the wheel alone")]
HINT = "pip install megatron-core"


@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO"], ["-I"]], ids=str)
def test_it_prints_its_version(environment, flags):
    version = environment.prints(*flags, "-m", "megatron_mtp_patches", "--version")
    assert version == f"{megatron_mtp_patches.__version__}\n"


def test_status_names_what_each_patch_lacks(environment):
    done = environment.command("status", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    status = json.loads(done.stdout)
    assert HINT in status["megatron"] and status["zero_touch"] == "not enabled"
    assert [patch["id"] for patch in status["patches"]] == [patch.id for patch in CATALOG]
    assert all("not installed" in patch["reason"] for patch in status["patches"])


@pytest.mark.parametrize(
    "words",
    [["status"], ["doctor"], ["doctor", "--", "--num-layers", "4"], ["explain", CATALOG[0].id], ["drift"]],
    ids=" ".join,
)
def test_it_names_what_is_missing(environment, words):
    done = environment.command(*words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert HINT in done.stdout + done.stderr


@pytest.mark.parametrize("words", [["run"], ["run", "--device", "cpu"], ["verify-mtp"]], ids=" ".join)
def test_a_script_runs_up_to_the_first_missing_import(environment, tmp_path, words):
    job = tmp_path / "job.py"
    job.write_text("import megatron.core\n")
    done = environment.command(*words, str(job))
    assert done.returncode == 1
    advice = "pip install 'torch>=2.11'" if "--device" in words else HINT
    assert advice in done.stderr.splitlines()[-1]
