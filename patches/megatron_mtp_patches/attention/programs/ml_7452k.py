"""The norm of the output norm's gradient in a GatedDeltaNet layer whose heads are split over two tensor-parallel ranks.
It is that of the sum over both.
"""

from ...defects.labs.lab import LENGTH, gather, make_config, make_ddp, norm, start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    import importlib

    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.spec_utils import build_module

    start(tensor_model_parallel_size=2)
    for ancestor in GatedDeltaNet.__mro__:
        names = vars(importlib.import_module(ancestor.__module__))
        if "HAVE_FLA" in names:  # with deterministic_mode a run needs none of its kernels but l2norm
            names |= {"HAVE_FLA": True, "l2norm": lambda tensor: torch.nn.functional.normalize(tensor, dim=-1)}
    sizes = {
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    }
    settings = {"linear_conv_kernel_dim": 2, "normalization": "RMSNorm", "deterministic_mode": True}
    settings |= {"activation_func": torch.nn.functional.silu, "tensor_model_parallel_size": 2, "add_bias_linear": False}
    settings |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 1}
    config = make_config(**settings, **sizes)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = torch.nn.Module()
    layer.self_attention = build_module(
        get_gated_delta_net_module_spec(config), config=config, layer_number=1, pg_collection=groups
    )
    layer.config, layer.forward = config, lambda *args: layer.self_attention(*args)[0]
    model = make_ddp(config, layer)
    torch.manual_seed(3)
    (model(torch.randn(LENGTH, 1, config.hidden_size), None) ** 2).sum().backward()
    weight = layer.self_attention.out_norm.weight
    expected = norm(sum(gather(weight.main_grad.clone())))
    finalize_model_grads([model])
    return expected, norm(weight.main_grad)
