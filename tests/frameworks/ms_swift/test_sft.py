"""ms-swift's own `megatron sft` trains MTP heads with the patches, over two tensor-parallel ranks."""

import pytest

pytestmark = [pytest.mark.forked("torch"), pytest.mark.guards("add-settings-to-ms-swift")]

ARGUMENTS = """
    --tensor_model_parallel_size 2 --split_dataset_ratio 0.1
    --mtp_detach_heads true --mtp_clip_grad 0.05 --mtp_loss_type tv --mtp_logits_chunk_size 64
""".split()
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
        assert line["mtp_grad_norm"] > 0 and line["updates_skipped_for_grad_norm"] == 0
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
