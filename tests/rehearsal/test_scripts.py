"""A process group that a script leaves open in a rehearsal is closed."""

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
