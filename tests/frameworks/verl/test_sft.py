"""The SFT trainer of the page trains the heads of a DeepSeek-V3, logs to TensorBoard, and resumes."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from megatron_mtp_patches.doctor.configuration import find_problems
from megatron_mtp_patches.doctor.findings import RunSettings, find_defects
from megatron_mtp_patches.doctor.run_files import read_runs

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


def test_tensorboard_has_the_metrics_of_each_step_also_of_a_resumed_run(save_model, tmp_path, monkeypatch, capsys):
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
    resume = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=verl_output/global_step_2"]
    for events, more in (("verl_output", []), ("resumed", resume)):
        (ended,) = run_ranks(1, partial(run, events, *words, *more))
        assert ended.code == 0, ended.output[-6000:]
    logged = scalars(tmp_path / "verl_output")
    assert all(list(values) == [1, 2, 3] for values in logged.values())
    values = {tag: list(values.values()) for tag, values in logged.items()}
    assert 5.0 < values["train/loss"][-1] < values["train/loss"][0] < 6.0
    assert all(norm > 0.0 for norm in values["megatron/mtp_grad_norm"])
    assert values["megatron/updates_skipped_for_grad_norm"] == [0.0] * STEPS
    assert all(5.0 < loss < 7.0 for loss in values["mtp_losses/mtp_1_loss"])
    assert all(0.0 <= rate <= 100.0 for rate in values["mtp_losses/mtp_1_acceptance_rate"])
    assert values["mtp_losses/mtp_loss_scaling_factor"] == pytest.approx([0.4, 0.35, 0.3])
    assert values["train/lr"][1] > values["train/lr"][2]

    programs = tmp_path / "numbers"
    programs.mkdir()
    ((_, _, numbers),) = read_by_bash(shown("verl-numbers"), programs)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(numbers)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(logged)
    assert f"train/loss {[round(loss, 3) for loss in values['train/loss']]}" in printed

    ((name, run_of_file),) = read_runs(tmp_path / "verl_output" / ".hydra" / "config.yaml")
    assert name.endswith(" sft") and find_problems(run_of_file) == []

    resumed = scalars(tmp_path / "resumed")
    assert resumed.keys() == logged.keys()
    same = {tag: {3: logged[tag][3]} for tag in logged if not tag.startswith(OTHERS_AFTER_A_RESUME)}
    assert {tag: resumed[tag] for tag in same} == same


def test_the_doctor_names_the_defects_of_a_configuration_that_the_trainer_prints(save_model, tmp_path):
    def print_configuration():
        os.chdir(tmp_path)
        with Path("c.yaml").open("w") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
        run_command("all", *(word.replace("deepseek_exported", str(model)) for word in words))

    (_, *words), (_, *doctor), (_, *parity) = read_by_bash(shown("verl-checks"), tmp_path)
    assert doctor[1:] == parity[1:] == ["--batch", "c.yaml"]
    model = save_model(1)
    (ended,) = run_ranks(1, print_configuration)
    assert ended.code == 0, ended.output[-6000:]
    ((_, run),) = read_runs(tmp_path / "c.yaml")
    assert "ML-5916" in {finding.id for finding in find_defects(RunSettings(run.sources, "2.17.1"))}
    assert find_problems(run) == [] and run.shows_patches
