"""The spread of the weights with which the second layer of a latent expert starts, as a multiple of --init-method-std,
in a model of two layers.
"""

from ...defects.labs.lab import make_config, make_gpt, start

NEEDS = ("transformer-engine",)


def reproduce():
    start()
    config = make_config(num_moe_experts=2, moe_latent_size=32, moe_grouped_gemm=True, add_bias_linear=False)
    experts = make_gpt(config, transformer_engine=True).decoder.layers[0].mlp.experts
    spread = experts.linear_fc2.weight0.std() / config.init_method_std
    return 1.0, round(float(spread), 1)
