"""The gradient of an expert of which two tensor-parallel ranks have a copy each, with --expert-tensor-parallel-size 1:
their parts of it, 1 and 2, should be added.
"""

from ...defects.labs.lab import gather, make_config, make_ddp, make_gpt, start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    import torch

    start(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    config = make_config(num_moe_experts=2, sequence_parallel=True, add_bias_linear=False, **sizes)
    model = make_ddp(config, make_gpt(config, transformer_engine=True))
    weight = next(param for name, param in model.named_parameters() if ".experts." in name)
    weight.main_grad.fill_(1.0 + torch.distributed.get_rank())
    model.finish_grad_sync()
    return [3.0, 3.0], gather(float(weight.main_grad.mean()))
