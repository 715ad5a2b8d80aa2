"""Attention of the vision encoder with --transformer-impl local: the norm of what the first of 16 patches gets from all
of them. It is to be that of attention without a mask.
"""

from ...defects.labs.lab import LENGTH, make_config, make_generator, norm, start


def reproduce():
    import torch
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.spec_utils import build_module

    start()
    config = make_config()
    spec = get_vit_layer_with_local_spec().submodules.self_attention
    attention = build_module(spec, config=config, layer_number=1).to(torch.get_default_device())
    patches = torch.randn(LENGTH, 1, config.hidden_size, generator=make_generator(1))
    heads = [part.permute(1, 2, 0, 3) for part in attention.get_query_key_value_tensors(patches, None)[:3]]
    context = torch.nn.functional.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)
    expected, _ = attention.linear_proj(context)
    seen, _ = attention(patches, None)
    return norm(expected[0]), norm(seen[0])
