"""The largest attention logit of a step, after a validation in which the weights were eight times as large."""

from ...defects.labs.lab import run_microbatches, start
from ...defects.labs.qk_clip_lab import largest_logits_of_step, make_clipping_model, multiply_weights

NEEDS = ("transformer-engine",)


def reproduce():
    start()
    model = make_clipping_model(transformer_engine=True)

    def validate_with_large_weights():
        model.eval()
        multiply_weights(model, 8.0)
        run_microbatches(model, 1, forward_only=True)
        multiply_weights(model, 1 / 8)
        model.train()

    return largest_logits_of_step(model, validate_with_large_weights)
