"""A step of a GPT under Megatron-FSDP with no_shard, without --overlap-param-gather."""

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import compute_gradients, make_config, make_gpt, make_optimizer, start

NEEDS = ("transformer-engine",)
EXPECTED = "a step"


def reproduce():
    start()
    config = make_config()
    model = make_fsdp(
        config,
        make_gpt(config, transformer_engine=True),
        data_parallel_sharding_strategy="no_shard",
        overlap_param_gather=False,
    )
    optimizer = make_optimizer(model, use_distributed_optimizer=True)
    compute_gradients(model)
    optimizer.step()
    return EXPECTED, EXPECTED
