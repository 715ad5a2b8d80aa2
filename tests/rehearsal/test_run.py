"""`run --device cpu` with a script that builds Megatron's parser, in a process that got no rank from a launcher."""

import os
import sys

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.cli import main

from tests.warm.levels import missing
from tests.warm.processes import LAUNCHER, run_ranks

pytestmark = pytest.mark.forked("python")

SCRIPT = """
import os, sys, torch
from megatron.training.initialize import initialize
args = initialize()
print("RESULT", torch.zeros(1, device="cuda").device, args.distributed_backend, args.num_workers, args.validated)
print("RANK", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_ADDR"])
sys.argv[1:] = ["--fp8-format", "hybrid"]
initialize()
"""


@pytest.mark.skipif(bool(missing("torch")), reason="torch is not installed")
def test_defaults_are_those_of_a_cpu_and_an_error_names_what_needs_a_gpu(checkout):
    (checkout / "script.py").write_text(SCRIPT)

    def run():
        for name in LAUNCHER:
            del os.environ[name]
        megatron_mtp_patches.apply("none")  # the patches would refuse this Megatron; those of the rehearsal stay
        sys.exit(main(["run", "--device", "cpu", str(checkout / "script.py"), "--num-workers", "3"]))

    (done,) = run_ranks(1, run)
    assert "RESULT cpu gloo 3 True\nRANK 0 of 1 at localhost\n" in done.output, done.output
    assert done.output.count("rehearsal on the CPU over gloo: distributed_backend=gloo\n") == 1
    assert done.code == 2
    assert "--fp8-format hybrid: fp8 needs a GPU" in done.output
