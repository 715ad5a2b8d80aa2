"""A GPT of two layers in Megatron-FSDP on two ranks, each of which is a pipeline stage."""

import torch

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import make_config, make_gpt, start

RANKS = 2
NEEDS = ("einops",)
EXPECTED = "a model"


def reproduce():
    start(pipeline_model_parallel_size=2)
    config = make_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    make_fsdp(config, make_gpt(config))
    return EXPECTED, EXPECTED
