"""The parameter groups of a GPT with experts on two ranks, where the second has frozen its dense weights: which are
those of experts.
"""

from ...defects.labs.lab import gather, make_config, make_gpt, start

RANKS = 2


def reproduce():
    import torch
    from megatron.core import optimizer

    start(expert_model_parallel_size=2)
    config = make_config(num_moe_experts=2, expert_model_parallel_size=2, add_bias_linear=False)
    model = make_gpt(config)
    for name, param in model.named_parameters():
        param.requires_grad = ".experts." in name or torch.distributed.get_rank() == 0
    groups = optimizer._get_param_groups([model], optimizer.OptimizerConfig(lr=1e-2), {})
    first, second = gather([group["is_expert_parallel"] for group in groups])
    return first, second
