"""A dense MLP with --use-transformer-engine-op-fuser in a run with --overlap-param-gather, whose first step gathers
before it computes: the all-gathers that nothing has waited for when the MLP of the next step has computed.
"""

import torch

from ...defects.labs.lab import LENGTH, make_config, make_ddp, make_generator, start

NEEDS = ("transformer-engine",)
RANKS = 2


def reproduce():
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.spec_utils import build_module

    start()
    config = make_config(num_layers=1)
    config.use_transformer_engine_op_fuser = True
    spec = specs.get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
    mlp = build_module(spec, config=config).mlp
    model = make_ddp(config, mlp, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    states = torch.randn(LENGTH, 1, config.hidden_size, generator=make_generator(1))
    model.disable_forward_pre_hook(param_sync=False)
    model(states)
    model.enable_forward_pre_hook()
    model.start_param_sync()
    model(states)
    return 0, sum(group.param_gather_handle is not None for group in model.bucket_groups)
