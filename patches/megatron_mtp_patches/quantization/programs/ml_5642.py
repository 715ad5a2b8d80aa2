"""Three steps of a model with a recipe of --te-precision-config-file and no other quantization: in how many of them a
layer is told that a step begins, and quantizes its weight.
"""

from ...defects.labs.lab import make_config

STEPS = 3
WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.transformer.module import MegatronModule

    class Layer(torch.nn.Module):
        """As TransformerEngine's layers, it leaves the first microbatch of a step with its forward pass."""

        is_first_microbatch = True
        quantizations = 0

        def forward(self):
            self.quantizations += self.is_first_microbatch
            self.is_first_microbatch = False

    config = make_config()
    config.quant_recipe = object()
    model = MegatronModule(config)
    model.layer = Layer()
    for _ in range(STEPS):
        model.set_is_first_microbatch()
        model.layer()
    return STEPS, model.layer.quantizations
