"""The norm of the gradient of an MTP head's router from its z-loss, where tokens 5 to 9 of 16 are padding. It is to be
that of a mean over the others, so over the places of the head whose next token is none of these.
"""

import torch

from ...defects.labs.lab import LENGTH, make_config, make_gpt, norm, start, tokens

PADDING = range(5, 10)


def reproduce():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    start()
    config = make_config(num_moe_experts=4, moe_z_loss_coeff=1.0, mtp_num_layers=1, add_bias_linear=False)
    config.mtp_loss_scaling_factor = 0.0
    model = make_gpt(config)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    router = next(module for name, module in model.mtp.named_modules() if name.endswith("router"))
    inputs = []
    router.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].detach()))
    ids, positions = tokens()
    is_padding = torch.tensor([[place in PADDING for place in range(LENGTH)]])
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    (0 * model(ids, positions, mask, labels=ids, padding_mask=is_padding)).sum().backward()
    weight = router.weight.detach().requires_grad_()
    counts = [place + 1 not in PADDING for place in range(LENGTH)]
    logits = (inputs[0].flatten(0, 1) @ weight.t())[counts]
    (logits.logsumexp(-1) ** 2).mean().backward()
    return norm(weight.grad), norm(router.weight.grad)
