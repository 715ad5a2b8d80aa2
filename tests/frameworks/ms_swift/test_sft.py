"""ms-swift's own `megatron sft` trains MTP heads with the patches over two tensor-parallel ranks, as its page shows."""

from functools import partial

import pytest
import yaml
from megatron_mtp_patches.doctor.findings import diagnose_sources
from megatron_mtp_patches.doctor.ms_swift_configuration import DEFAULTS
from megatron_mtp_patches.doctor.run_files import read_runs

from ..flipped_bit import FLIPPED, flip_bit

pytestmark = [pytest.mark.forked("torch"), pytest.mark.guards("add-settings-to-ms-swift")]

METRICS = {"mtp_grad_norm", "updates_skipped_for_grad_norm", "mtp_updates_skipped_for_grad_norm", "mtp_1_loss"}
LENGTHS = {"mtp_acceptance_length", "mtp_greedy_acceptance_length"}
RATE, RATE_SO_FAR = "mtp_1_acceptance_rate", "mtp_1_cumulative_acceptance_rate"
TIMES = {"elapsed_time", "remaining_time", "train_speed(s/it)", "memory(GiB)"}
BAD_STEP = 4  # the first one after the checkpoint


def enlarge_gradient():
    """Have the loss of this step train 1000 times as much, as a bad batch may."""
    from swift.megatron.trainers.base import BaseMegatronTrainer

    train = BaseMegatronTrainer.train_step

    def train_step(trainer, iterator):
        scale = trainer.config.grad_scale_func
        if trainer.state.iteration == BAD_STEP - 1:
            trainer.config.grad_scale_func = lambda loss: 1000.0 * scale(loss)
        metrics = train(trainer, iterator)
        trainer.config.grad_scale_func = scale
        return metrics

    BaseMegatronTrainer.train_step = train_step


def numbers(lines):
    """What a run that goes on logs as one that was not interrupted."""
    return [{name: value for name, value in line.items() if name not in TIMES | {RATE_SO_FAR}} for line in lines]


@pytest.fixture(scope="module")
def trained(run_shown):
    """Five steps, of which the fourth is skipped, and a checkpoint after the third."""
    return run_shown("train", fault=enlarge_gradient)


def test_its_log_has_the_metrics(trained):
    training = trained.training
    assert [line["iteration"] for line in training] == [f"{step}/5" for step in range(1, 6)]
    for line in training:
        assert line.keys() >= METRICS | LENGTHS | {RATE, RATE_SO_FAR}
        assert line["mtp_grad_norm"] > 0
        assert line["watch_findings"] == 0
    assert [line["updates_skipped_for_grad_norm"] for line in training] == [0, 0, 0, 1, 1]
    assert training[-1]["loss"] < training[0]["loss"] and training[-1]["mtp_1_loss"] < training[0]["mtp_1_loss"]


def test_its_evaluation_has_no_rates_that_were_not_measured(trained):
    assert len(trained.evaluation) == 2
    assert not [name for line in trained.evaluation for name in line if "acceptance" in name or "norm" in name]
    assert all(line["eval_mtp_1_loss"] == 0 for line in trained.evaluation)  # mcore-bridge runs no heads in it


def test_it_goes_on_from_its_checkpoint_as_if_it_had_not_ended(run_shown, trained):
    resumed = run_shown("resume", fault=enlarge_gradient)
    lines, uninterrupted = resumed.training, trained.training[BAD_STEP - 1 :]
    assert all(line[RATE] > 0 for line in lines)
    assert numbers(lines) == numbers(uninterrupted)
    assert lines[0][RATE_SO_FAR] == lines[0][RATE] != uninterrupted[0][RATE_SO_FAR]  # it counts since the start
    assert numbers(resumed.evaluation) == numbers(trained.evaluation[1:])


@pytest.fixture(scope="module")
def arguments_of_page(shown_commands, folder):
    """The arguments of this run, which are those in run.yaml."""
    words = shown_commands["train"][0]
    words = words[words.index("sft") + 1 :]
    pairs = zip(words[::2], words[1::2], strict=True)
    page_arguments = {name.removeprefix("--"): yaml.safe_load(value) for name, value in pairs}
    (folder / "run.yaml").write_text(yaml.safe_dump(page_arguments))
    return page_arguments


def test_its_defects_are_those_by_its_arguments_alone(trained, folder, arguments_of_page):
    """A YAML file has these alone, so what `doctor` assumes of the others has to be what ms-swift has."""
    runs = [read_runs(file)[0][1] for file in (folder / "swift_output/trained/args.json", folder / "run.yaml")]
    assert [run.hints for run in runs] == [(), ()]
    saved, read = ({finding.id for finding in diagnose_sources(run.sources, None)} for run in runs)
    assert saved == read and "ML-7452c" in read
    arguments = runs[0].content
    left_out = DEFAULTS.keys() - arguments_of_page.keys()
    wrong = [name for name in left_out if arguments[name] not in (None, DEFAULTS[name])]
    assert not wrong  # None stands for what a model without experts lacks


def test_a_watch_names_a_bit_that_flips_in_a_frozen_weight_of_a_rank(run_words, trained, arguments_of_page):
    """In the second step of two microbatches that train adapters, with the arguments of a YAML file.

    `trained` is watched, and has no finding.
    """
    assert trained.output.count("watch: compares") == 2  # before there are moments, and then
    adapters = "--tuner_type lora --lora_rank 4 --target_modules all-linear --split_dataset_ratio 0".split()
    words = ["sft", "run.yaml", "--output_dir", "flipped", "--train_iters", "2", *adapters]
    output = run_words(words, ranks=2, fault=partial(flip_bit, passes=2), refused=True)
    assert f"WatchError: watch, step 2: copies differ: weight {FLIPPED} 0:64" in output
