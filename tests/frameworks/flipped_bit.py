"""A bit that flips in one rank's copy of a weight while a framework trains."""

import os

FLIPPED = "decoder.final_layernorm.weight"


def flip_bit(passes):
    """Flip a bit of the mantissa of this weight on rank 1, after so many training passes of a GPTModel."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    seen = []

    def flip(module, inputs):
        if type(module).__name__ != "GPTModel" or not module.training:
            return
        if len(seen) == passes:
            module.decoder.final_layernorm.weight.data.view(torch.int16)[0] ^= 1 << 6
        seen.append(module)

    if os.environ["RANK"] == "1":
        register_module_forward_pre_hook(flip)
