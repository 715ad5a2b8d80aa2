"""What several scripts need to run Megatron's trainer from a wheel, without TransformerEngine and Apex."""

from __future__ import annotations

import importlib.util

# Where TransformerEngine and Apex are absent.
PLAIN_MODULES = """
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
"""


def spare_helper_build() -> None:
    """Megatron's start runs `make`, but a wheel has no Makefile: it ships the dataset helpers compiled."""
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None
