"""Whether attention computes in fp8 by the recipe of a run with --fp8-recipe mxfp8 and fp8_dot_product_attention."""

from ...defects.labs.lab import make_config, start

NEEDS = ("transformer-engine",)


def reproduce():
    from megatron.core.fp8_utils import get_fp8_recipe

    start()
    config = make_config(fp8="hybrid", fp8_recipe="mxfp8", fp8_dot_product_attention=True)
    return True, get_fp8_recipe(config).fp8_dpa
