"""The logged maximum of the attention logits of a step, after one in which the weights were eight times as large."""

from ...defects.labs.lab import run_microbatches, start
from ...defects.labs.qk_clip_lab import clip, largest_logits_of_step, make_clipping_model, multiply_weights

NEEDS = ("transformer-engine",)


def reproduce():
    start()
    model = make_clipping_model(transformer_engine=True)

    def take_step_with_large_weights():
        multiply_weights(model, 8.0)
        run_microbatches(model, 1)
        clip(model, log_max_only=True)
        multiply_weights(model, 1 / 8)

    return largest_logits_of_step(model, take_step_with_large_weights)
