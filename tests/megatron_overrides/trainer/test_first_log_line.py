"""The first step of a process is in one interval of the log. Needs megatron.training: not in the 0.16.1 wheel."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("log-first-step-once")]
pytest.importorskip("megatron.training.training", reason="the 0.16.1 wheel has no megatron.training")


@pytest.mark.parametrize(
    "interval, first, losses, lines",
    [
        (1, 1, [1.0, 3.0, 5.0], [1.0, 3.0, 5.0]),
        (2, 1, [1.0, 3.0, 5.0, 7.0], [1.0, 2.0, 6.0]),  # a line before the end of the interval that it is in
        (2, 4, [1.0, 3.0, 5.0, 7.0], [1.0, 4.0]),
    ],
)
def test_a_line_has_the_steps_of_its_interval(interval, first, losses, lines):
    import torch
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars
    from megatron_mtp_patches.defects.labs.trainer_lab import TrainingLog

    log = TrainingLog("--num-layers 2", interval)
    steps = [
        log.add_step(step, losses={"lm loss": torch.tensor([loss])}, is_first=step == first)
        for step, loss in enumerate(losses, start=first)
    ]
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    assert [step["lm loss"] for step in steps if step] == lines
