"""Trainings with a watch."""

import pytest


@pytest.fixture
def train(parallel, make_gpt):
    """train(layout, steps, fault, **settings): the training after so many steps, before each of which `fault` acts.

    fault(training, step) may return a function that takes the place of the torch optimizers' step.
    """
    import torch

    from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

    def run(layout, steps=3, fault=lambda training, step: None, **settings):
        parallel(**layout)
        half = {"bf16": True, "params_dtype": torch.bfloat16} if settings.get("bf16") else {}
        model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=None, **layout, **half)
        training = HeadTraining([model], **{"watch_invariants": 1, "watch_action": "raise", **settings})
        for step in range(1, steps + 1):
            fault(training, step)
            training.step(step)
        return training

    return run
