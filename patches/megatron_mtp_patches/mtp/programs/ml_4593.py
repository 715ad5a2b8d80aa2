"""The gradient norm of an MTP head in fp8, whose kernels are those of fp32 here, without and with full activation
recomputation.
"""

import inspect
from contextlib import nullcontext

from ...defects.labs.lab import LENGTH, make_config, make_gpt, norm, start

NEEDS = ("transformer-engine",)


def reproduce():
    import torch
    from megatron.core.transformer import multi_token_prediction

    start()
    multi_token_prediction.get_fp8_context = lambda config, **settings: nullcontext()
    config = make_config(mtp_num_layers=1)
    (head,) = make_gpt(config, transformer_engine=True).mtp.layers
    config.fp8, config.recompute_method, config.recompute_num_layers = "hybrid", "uniform", 1
    names = ("hidden_states", "decoder_input")
    inputs = {name: torch.randn(LENGTH, 1, config.hidden_size, requires_grad=True) for name in names}
    inputs["attention_mask"] = None
    computed = head._proj_and_transformer_layer(**inputs)
    takes_function = "forward_func" in inspect.signature(head._checkpointed_forward).parameters
    recomputed = head._checkpointed_forward(*[head._proj_and_transformer_layer] * takes_function, **inputs)
    return norm_of_gradients(computed, head), norm_of_gradients(recomputed, head)


def norm_of_gradients(output, head):
    head.zero_grad()
    if output.requires_grad:
        (output**2).sum().backward()
    return norm(*(param.grad for param in head.parameters() if param.grad is not None))
