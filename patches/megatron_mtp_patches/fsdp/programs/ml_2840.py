"""A layer with two experts under Megatron-FSDP with two optimizer instances of two ranks, which have an expert each:
the weights with which each rank's expert computes. Those of the first expert are 1, those of the second 2.
"""

import torch

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import gather, make_config, make_gpt, start, tokens

RANKS = 4
NEEDS = ("einops",)


def reproduce():
    start(expert_model_parallel_size=2, num_distributed_optimizer_instances=2)
    config = make_config(num_layers=1, num_moe_experts=2, expert_model_parallel_size=2, add_bias_linear=False)
    gpt = make_gpt(config)
    own_weight = 1.0 + torch.distributed.get_rank() % 2
    with torch.no_grad():
        for name, param in gpt.named_parameters():
            if ".experts." in name:
                param.fill_(own_weight)
    expert = next(module for name, module in gpt.named_modules() if name.endswith("local_experts.0.linear_fc2"))
    model = make_fsdp(config, gpt, num_distributed_optimizer_instances=2)
    weights = []
    expert.register_forward_pre_hook(lambda module, inputs: weights.extend([module.weight.min(), module.weight.max()]))
    ids, positions = tokens()
    model(ids, positions, None, labels=ids)
    return [[own_weight] * 2 for own_weight in gather(own_weight)], gather([float(weight) for weight in weights])
