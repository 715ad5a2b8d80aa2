"""Whether attention computes in fp8 by the recipe of a run with --fp4-format and fp8_dot_product_attention."""

from ...defects.labs.lab import make_config, start

NEEDS = ("transformer-engine",)


def reproduce():
    from megatron.core.fp4_utils import get_fp4_recipe

    start()
    return True, get_fp4_recipe(make_config(fp4="e2m1", fp8_dot_product_attention=True)).fp8_dpa
