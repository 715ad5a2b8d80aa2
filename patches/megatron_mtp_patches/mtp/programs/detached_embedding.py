"""Two steps of a GPT with a detached MTP head on two pipeline stages, with --overlap-grad-reduce."""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, start

RANKS = 2
EXPECTED = "two steps"


def reproduce():
    import torch

    start(pipeline_model_parallel_size=2)
    stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    config = make_config(mtp_num_layers=1, mtp_detach_heads=True, **stages)
    model = make_ddp(config, make_gpt(config), overlap_grad_reduce=True)
    for _ in range(2):
        compute_gradients(model)
    return EXPECTED, "two steps"
