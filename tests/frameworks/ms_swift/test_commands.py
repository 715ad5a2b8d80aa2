"""The other commands of ms-swift train MTP heads with the patches: pt, dpo, samples without padding, adapters."""

import pytest

pytestmark = pytest.mark.forked("torch")

DETACHED = ["--mtp_detach_heads", "true", "--mtp_clip_grad", "0.05"]
NOT_SAVED = ["--split_dataset_ratio", "0", "--no_save_optim", "true"]
RUNS = {
    "texts": ("pt", "pt", []),
    "preferences": ("rlhf", "dpo", ["--rlhf_type", "dpo"]),
    "without padding": ("sft", "sft", ["--padding_free", "true"]),
    "packed": ("sft", "sft", ["--packing", "true"]),
    "adapters": ("sft", "sft", ["--tuner_type", "lora", "--lora_rank", "4", "--target_modules", "all-linear"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_heads_train_and_the_main_model_does_not_depend_on_the_weight_of_their_loss(megatron, name):
    command, data, arguments = RUNS[name]

    def train(factor):
        words = [*arguments, *NOT_SAVED, *DETACHED, "--mtp_loss_scaling_factor", factor]
        return megatron(command, data, f"{name} {factor}", 2, *words).training

    once, scaled = train("0.1"), train("0.9")
    assert all(line["mtp_grad_norm"] > 0.0 and line["mtp_1_loss"] > 0.0 for line in once)
    assert scaled[0]["mtp_grad_norm"] == pytest.approx(9.0 * once[0]["mtp_grad_norm"], rel=1e-2)
    assert [line["loss"] for line in once] == [line["loss"] for line in scaled]
