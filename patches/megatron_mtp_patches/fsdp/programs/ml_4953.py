"""A step of a GPT under PyTorch's FSDP2."""

from ...defects.labs.lab import compute_gradients, make_config, make_gpt, start

EXPECTED = "gradients"


def reproduce():
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

    start()
    config = make_config(transformer_impl="local")
    compute_gradients(TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), make_gpt(config)))
    return EXPECTED, EXPECTED
