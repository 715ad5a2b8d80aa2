"""The samples of a validation set of five that --full-validation gives in batches of two."""

import sys

from ...defects.labs.lab import start

NEEDS = ("megatron.training",)
SAMPLES = 5


def reproduce():
    import torch
    from megatron.core.datasets.utils import Split
    from megatron.training import arguments, global_vars
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader

    start()
    sys.argv = ["train", *"--full-validation --micro-batch-size 2 --dataloader-type single --num-workers 0".split()]
    args = arguments.parse_args()
    args.eval_micro_batch_size, args.eval_global_batch_size = 2, 2
    global_vars.set_args(args)
    validation_set = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    validation_set.split = Split.valid
    loader = build_pretraining_data_loader(validation_set, 0)
    return list(range(SAMPLES)), [int(sample) for (batch,) in loader for sample in batch]
