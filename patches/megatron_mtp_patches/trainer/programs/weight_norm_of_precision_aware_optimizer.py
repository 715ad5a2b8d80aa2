"""The norm of the weights that Megatron's trainer logs in bf16, with the precision-aware optimizer, which keeps the
main parameters inside: it is to be that of the model's weights.
"""

import torch

from ...defects.labs.lab import make_config, make_ddp, make_gpt, make_optimizer, norm, start
from ...defects.labs.trainer_lab import norm_of_weights

NEEDS = ("transformer-engine", "megatron.training")


def reproduce():
    start()
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    model = make_ddp(config, make_gpt(config).bfloat16(), use_distributed_optimizer=True)
    make_optimizer(model, use_distributed_optimizer=True, bf16=True, use_precision_aware_optimizer=True)
    return norm(*(param.float() for param in model.parameters())), norm_of_weights(model, bf16=True)
