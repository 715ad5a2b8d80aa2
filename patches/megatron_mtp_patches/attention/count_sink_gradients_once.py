"""Declares count-sink-gradients-once."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="count-sink-gradients-once",
    summary="Count the gradient of learnable attention sinks once under context parallelism",
    package="transformer-engine",
    problem="With `--softmax-type learnable` and `--cp-comm-type a2a`, TransformerEngine gathers the sinks' gradient, "
    "so each context-parallel rank has the whole of it. Megatron adds up the gradients of these ranks. So it is as "
    "many times too large as there are ranks.",
    adds=("Each rank gets its share of the gathered gradient.",),
    numerics="With learnable sinks and `--context-parallel-size` > 1: the gradients of the sinks, and the gradient "
    "norm. Adam cancels a constant factor, so its updates of the sinks change through clipping and epsilon alone.",
    notes=(
        "It patches TransformerEngine, whose `a2a` is the only way that it has for sinks under context parallelism. If "
        "it is not installed, the patch is pending.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "transformer_engine.pytorch.attention.dot_product_attention.context_parallel:"
            "flash_attn_a2a_communicate_softmax_offset",
            "megatron_overrides.attention.sinks:count_gradient_once",
        ),
    ),
)
