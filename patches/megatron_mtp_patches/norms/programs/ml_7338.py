"""A step of a precision-aware optimizer over a bf16 weight and one in fp32, each gradient entry of which is 1. In
place of TransformerEngine's kernel, which would misread such a list, what stands for it ends in an error.
"""

import torch

from ...defects.labs.lab import make_config, make_ddp, make_optimizer, start

ASSUMES = "TransformerEngine's multi_tensor_l2norm misreads a list of tensors of several dtypes"
NEEDS = ("transformer-engine",)
EXPECTED = [64**0.5]


def reproduce():
    start()
    dtypes = (torch.bfloat16, torch.float32)
    module = torch.nn.ModuleList(torch.nn.Linear(8, 4, bias=False, dtype=dtype) for dtype in dtypes)
    model = make_ddp(make_config(), module, use_distributed_optimizer=True)
    precision = {"bf16": True, "params_dtype": torch.bfloat16, "main_grads_dtype": torch.bfloat16}
    precision["use_precision_aware_optimizer"] = True
    optimizer = make_optimizer(model, use_distributed_optimizer=True, **precision)
    for param in model.parameters():
        param.main_grad.fill_(1.0)
    _, norm, _ = optimizer.step()
    return EXPECTED, [float(norm)]
