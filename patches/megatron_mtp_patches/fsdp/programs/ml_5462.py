"""The sum of the gradients of a bf16 weight under Megatron-FSDP with grad_reduce_in_fp32, over 300 microbatches with
the gradient 1 each. In bf16 such a sum stays at 256.
"""

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import make_config, start

MICROBATCHES = 300
NEEDS = ("einops",)


def reproduce():
    import torch

    start()
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    layer = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    model = make_fsdp(config, torch.nn.Sequential(layer), [torch.nn.Linear], grad_reduce_in_fp32=True)
    model.zero_grad_buffer()
    for _ in range(MICROBATCHES - 1):
        with model.no_sync():
            model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    model.finish_grad_sync()
    ((_, param),) = model.module.param_and_grad_buffer.optimizer_named_parameters
    return float(MICROBATCHES), float(param.grad._local_tensor.max())
