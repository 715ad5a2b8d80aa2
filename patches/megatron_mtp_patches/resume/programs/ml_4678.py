"""A checkpoint in the old format of a model with experts on two tensor-parallel ranks, with
--expert-tensor-parallel-size 1: the shards that are written.
"""

import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch

from ...defects.labs.lab import make_config, make_gpt, start

RANKS = 2
NEEDS = ("megatron.training",)


def reproduce():
    from megatron.training import arguments, checkpointing, global_vars

    start(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    config = make_config(num_layers=1, num_moe_experts=2, add_bias_linear=False, **sizes)
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    sys.argv = ["train", *f"--ckpt-format torch --save {folder[0]} --no-save-optim --no-save-rng".split()]
    args = arguments.parse_args()
    args.use_dist_ckpt, args.consumed_train_samples = False, 0
    global_vars.set_args(args)
    with redirect_stdout(StringIO()):
        checkpointing.save_checkpoint(1, [make_gpt(config)], None, None, 0)
    torch.distributed.barrier()
    shards = sorted(file.parent.name for file in Path(folder[0]).glob("*/*/model_optim_rng.pt"))
    return ["mp_rank_00", "mp_rank_01"], shards
