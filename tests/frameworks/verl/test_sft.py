"""The SFT trainer of the page trains the heads of a DeepSeek-V3 and logs the metrics of the patches to TensorBoard."""

import os
from functools import partial

import pytest

from tests.end_to_end.conftest import run_command
from tests.pages import read_by_bash, shown
from tests.warm.processes import run_ranks

from .conftest import REHEARSED

pytestmark = pytest.mark.forked("verl")

STEPS = 3


def test_tensorboard_has_the_metrics_of_each_step(save_model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(*words):
        os.environ |= {"TENSORBOARD_DIR": "events", "HF_HUB_OFFLINE": "1"}
        os.chdir(tmp_path)
        exec(tokenizer)
        exec(data)
        run_command("all", *words)

    (_, _, tokenizer), (_, _, data), (_, *words) = read_by_bash(shown("verl-rehearsal"), tmp_path)
    rehearsed = {
        f"++engine.override_transformer_config.{name}={str(value).lower()}" for name, value in REHEARSED.items()
    }
    assert rehearsed < set(words)
    (ended,) = run_ranks(1, partial(run, *words, f"model.path={save_model(1)}"))
    assert ended.code == 0, ended.output[-6000:]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    values = {tag: [one.value for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {len(one) for one in values.values()} == {STEPS}
    assert values["train/loss"][-1] < values["train/loss"][0]
    assert all(norm > 0.0 for norm in values["megatron/mtp_grad_norm"])
    assert values["megatron/updates_skipped_for_grad_norm"] == [0.0] * STEPS
    assert all(5.0 < loss < 7.0 for loss in values["mtp_losses/mtp_1_loss"])
    assert all(0.0 <= rate <= 100.0 for rate in values["mtp_losses/mtp_1_acceptance_rate"])
