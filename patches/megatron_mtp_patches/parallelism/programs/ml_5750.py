"""The epsilon of a norm of its own before a Mamba layer in a run with --norm-epsilon 0.5: an input of which each number
is 1 becomes the root of 1 / 1.5.
"""

import torch

from ...defects.labs.lab import make_config, start


def reproduce():
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    start()
    config = make_config(normalization="RMSNorm", layernorm_epsilon=0.5)
    parts = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=IdentityOp)
    layer = MambaLayer(config, parts, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    normed = layer.norm(torch.ones(1, config.hidden_size))
    return (1 / 1.5) ** 0.5, float(normed[0, 0])
