"""Scripts in a rehearsal: a process group that they leave open, and their calls of revert() and apply()."""

import megatron_mtp_patches
import pytest
import torch.distributed as dist
from megatron_mtp_patches.cli.run import run_script

from tests.warm.processes import run_ranks

pytestmark = pytest.mark.forked("torch")


def test_a_process_group_that_a_script_leaves_open_is_closed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist; dist.init_process_group('nccl'); print('open', dist.is_initialized())"
    )

    def run():
        run_script(str(script), [], "cpu")
        print("open", dist.is_initialized())

    (done,) = run_ranks(1, run)
    assert (done.code, done.output) == (0, "open True\nopen False\n")


def test_revert_restores_megatrons_flags_and_apply_sets_those_of_the_cpu_again(checkout):
    script = checkout / "script.py"
    script.write_text(
        "import megatron_mtp_patches\n"
        "from megatron.training.initialize import initialize\n"
        "for step in (int, megatron_mtp_patches.revert, lambda: megatron_mtp_patches.apply('none')):\n"
        "    step()\n"
        "    print('RESULT', initialize().distributed_backend)\n"
    )

    def run():
        megatron_mtp_patches.apply("none")
        run_script(str(script), [], "cpu")

    (done,) = run_ranks(1, run)
    on_the_cpu = "rehearsal on the CPU over gloo: num_workers=0, distributed_backend=gloo\nRESULT gloo\n"
    assert (done.code, done.output) == (0, f"{on_the_cpu}RESULT nccl\n{on_the_cpu}")
