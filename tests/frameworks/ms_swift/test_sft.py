"""ms-swift's own `megatron sft` trains MTP heads with the patches, over two tensor-parallel ranks."""

from functools import partial

import pytest

from ..flipped_bit import FLIPPED, flip_bit

pytestmark = [pytest.mark.forked("torch"), pytest.mark.guards("add-settings-to-ms-swift")]

WATCHED_RANKS = ["--tensor_model_parallel_size", "2", "--watch_invariants", "1", "--watch_action", "raise"]
ARGUMENTS = (
    """
    --split_dataset_ratio 0.1
    --mtp_detach_heads true --mtp_clip_grad 0.05 --mtp_loss_type tv --mtp_logits_chunk_size 64
""".split()
    + WATCHED_RANKS
)
METRICS = {"mtp_grad_norm", "updates_skipped_for_grad_norm", "mtp_updates_skipped_for_grad_norm", "mtp_1_loss"}
LENGTHS = {"mtp_acceptance_length", "mtp_greedy_acceptance_length"}
RATES = {"mtp_1_acceptance_rate", "mtp_1_cumulative_acceptance_rate"}


@pytest.fixture(scope="module")
def trained(megatron):
    """Three steps without a skipped update, and a checkpoint."""
    return megatron("sft", "sft", "trained", 3, *ARGUMENTS, "--grad_norm_skip_threshold", "100", ranks=2)


def test_its_log_has_the_metrics(trained):
    training = trained.training
    assert [line["iteration"] for line in training] == ["1/3", "2/3", "3/3"]
    for line in training:
        assert line.keys() >= METRICS | RATES | LENGTHS
        assert line["mtp_grad_norm"] > 0
        assert line["updates_skipped_for_grad_norm"] == line["watch_findings"] == 0
    assert training[-1]["loss"] < training[0]["loss"] and training[-1]["mtp_1_loss"] < training[0]["mtp_1_loss"]


def test_its_evaluation_has_no_rates_that_were_not_measured(trained):
    (evaluation,) = trained.evaluation
    assert not [name for name in evaluation if "acceptance" in name or "norm" in name]


def test_it_goes_on_from_its_checkpoint_through_a_skipped_update(megatron, folder, trained):
    checkpoint = ["--mcore_model", str(folder / "trained" / "checkpoint-3"), "--finetune", "false"]
    skipping = [*ARGUMENTS, *checkpoint, "--grad_norm_skip_threshold", "1e-3"]
    training = megatron("sft", "sft", "resumed", 5, *skipping, ranks=2).training
    assert [line["iteration"] for line in training] == ["4/5", "5/5"]
    assert [line["updates_skipped_for_grad_norm"] for line in training] == [1, 2]
    assert training[0]["loss"] < trained.training[0]["loss"]


def test_a_watch_names_a_bit_that_flips_in_a_frozen_weight_of_a_rank(megatron, trained):
    """In the second step of two microbatches that train adapters; `trained` is watched, and has no finding."""
    assert trained.output.count("watch: compares") == 2  # before there are moments, and then
    adapters = "--tuner_type lora --lora_rank 4 --target_modules all-linear --split_dataset_ratio 0".split()
    flipped = partial(flip_bit, passes=2)
    output = megatron("sft", "sft", "flipped", 2, *WATCHED_RANKS, *adapters, ranks=2, fault=flipped, refused=True)
    assert f"WatchError: watch, step 2: copies differ: weight {FLIPPED} 0:64" in output
