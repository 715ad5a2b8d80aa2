"""The SFT trainer of the page trains the heads of a DeepSeek-V3, logs to TensorBoard, and resumes."""

import os
from functools import partial

import pytest

from tests.end_to_end.conftest import run_command
from tests.pages import read_by_bash, shown
from tests.warm.processes import run_ranks

from .conftest import REHEARSED

pytestmark = [pytest.mark.forked("verl"), pytest.mark.guards("schedule-mtp-loss-weight-in-verl")]

STEPS = 3
RESUMABLE = [
    "trainer.save_freq=2",
    "optim.lr_decay_style=linear",
    "optim.use_checkpoint_opt_param_scheduler=true",
    "+engine.override_transformer_config.mtp_loss_scaling_schedule='0:0.4,8:0'",
    "+engine.override_transformer_config.mtp_loss_scaling_schedule_style=linear",
]
# Times and memory, and what verl counts from the start of the process.
OTHERS_AFTER_A_RESUME = ("perf/", "train/mfu", "train/total_tokens(B)", "mtp_losses/mtp_1_cumulative_acceptance_rate")


def scalars(folder):
    """The values that a run has logged in a folder, by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_metrics_of_each_step_also_of_a_resumed_run(save_model, tmp_path):
    def run(events, *words):
        os.environ |= {"TENSORBOARD_DIR": events, "HF_HUB_OFFLINE": "1"}
        os.chdir(tmp_path)
        exec(tokenizer)
        exec(data)
        run_command("all", *words)

    (_, _, tokenizer), (_, _, data), (_, *words) = read_by_bash(shown("verl-rehearsal"), tmp_path)
    rehearsed = {
        f"++engine.override_transformer_config.{name}={str(value).lower()}" for name, value in REHEARSED.items()
    }
    assert rehearsed < set(words)
    words += [f"model.path={save_model(1)}", *RESUMABLE]
    resume = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=checkpoints/gsm8k-sft/test/global_step_2"]
    for events, more in (("events", []), ("resumed", resume)):
        (ended,) = run_ranks(1, partial(run, events, *words, *more))
        assert ended.code == 0, ended.output[-6000:]
    logged = scalars(tmp_path / "events")
    assert all(list(values) == [1, 2, 3] for values in logged.values())
    values = {tag: list(values.values()) for tag, values in logged.items()}
    assert values["train/loss"][-1] < values["train/loss"][0]
    assert all(norm > 0.0 for norm in values["megatron/mtp_grad_norm"])
    assert values["megatron/updates_skipped_for_grad_norm"] == [0.0] * STEPS
    assert all(5.0 < loss < 7.0 for loss in values["mtp_losses/mtp_1_loss"])
    assert all(0.0 <= rate <= 100.0 for rate in values["mtp_losses/mtp_1_acceptance_rate"])
    assert values["mtp_losses/mtp_loss_scaling_factor"] == pytest.approx([0.4, 0.35, 0.3])
    assert values["train/lr"][1] > values["train/lr"][2]

    resumed = scalars(tmp_path / "resumed")
    assert resumed.keys() == logged.keys()
    same = {tag: {3: logged[tag][3]} for tag in logged if not tag.startswith(OTHERS_AFTER_A_RESUME)}
    assert {tag: resumed[tag] for tag in same} == same
