"""Other runs of ms-swift: pt, dpo, packed samples, adapters, the repairs alone, experts beside a frozen model."""

import pytest

from tests.end_to_end.conftest import launch

from .conftest import COMMAND, read_log
from .save_model import save_mixture

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


@pytest.mark.parametrize("settings", [[], ["--freeze_base_model_for_mtp", "true"]], ids=["all train", "heads alone"])
def test_the_auxiliary_loss_is_logged_as_the_mean_of_the_layers_that_have_one(megatron, folder, settings):
    """As each token goes to each expert, that of a layer is 1."""
    save_mixture(folder / "mixture")
    model = ["--model", "mixture", "--model_type", "qwen3_moe", "--template", "qwen3", "--moe_aux_loss_coeff", "0.01"]
    (line,) = megatron("sft", "sft", f"mixture {len(settings)}", 1, *model, *settings, *NOT_SAVED).training
    assert line["load_balancing_loss"] == pytest.approx(1.0, rel=1e-2)


def test_the_repairs_alone_train_as_the_page_shows(shown_commands, folder, monkeypatch):
    (_, *words), patches = shown_commands["repairs"]
    script = words.index("tests/frameworks/ms_swift/command.py")
    monkeypatch.chdir(folder)
    codes, output = launch(1, patches, *words[:script], str(COMMAND), *words[script + 1 :])
    assert codes == {0}, output[-6000:]
    assert "profile=repairs: " in output
    training = read_log(folder, words, output).training
    assert [line["iteration"] for line in training] == ["1/3", "2/3", "3/3"]
    assert training[-1]["loss"] < training[0]["loss"] and training[-1]["mtp_1_loss"] < training[0]["mtp_1_loss"]
    assert not any("skipped" in name or "acceptance" in name or name == "mtp_grad_norm" for name in training[0])
