"""Megatron-Bridge's own `finetune` and `distill` train MTP heads with the patches: whole models and adapters."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.bridge.models.transformer_config import TransformerConfig
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .bridge_runs import EXPERTS, LOG_LINE, pretrain

pytestmark = pytest.mark.forked("bridge")

SCRIPT = str(Path(__file__).with_name("bridge_finetune.py"))
DETACHED = ("model.mtp_detach_heads=True", "optimizer.mtp_clip_grad=0.05", "optimizer.grad_norm_skip_threshold=100.0")
NO_CHECKPOINT = ("checkpoint.save=null", "checkpoint.load=null", "validation.eval_iters=0")
WANDB = ("logger.wandb_project=heads", "logger.wandb_exp_name=sft")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """It has a checkpoint of one step."""
    folder = tmp_path_factory.mktemp("finetuning")
    pretrain(folder, 1, "validation.eval_iters=0")
    return folder


def train(folder, kind, *settings, ranks=1):
    """Two steps: [(losses, metrics of the patches)] of their log lines."""
    words = ["run", "--device", "cpu", SCRIPT, str(folder), kind, "2", *settings]
    ended = run_ranks(ranks, partial(run_command, "all", *words))
    output = "".join(rank.output for rank in ended)
    assert {rank.code for rank in ended} == {0}, output[-6000:]
    steps = [read_metrics(line) for line in output.splitlines() if LOG_LINE.search(line)]
    assert len(steps) == 2
    return steps


def read_metrics(line):
    parts = [part.strip().rpartition(":") for part in line.split("|")]
    return {name.strip(): text.strip() for name, _, text in parts if name}


@pytest.fixture(scope="session")
def sft(folder):
    os.environ["WANDB_MODE"] = "offline"
    wandb_folder = folder / "wandb"
    wandb_folder.mkdir()
    return train(folder, "sft", *DETACHED, *WANDB, f"logger.wandb_save_dir={wandb_folder}", *NO_CHECKPOINT)


def test_detached_heads_train_on_answers_and_the_main_model_trains_as_without_them(folder, sft):
    without = train(folder, "sft", "model.disable_mtp_loss=True", *NO_CHECKPOINT)
    names = ("lm loss", "grad norm", "updates skipped for grad norm")
    assert [[step.get(name) for name in names[:2]] for step in sft] == [
        [step.get(name) for name in names[:2]] for step in without
    ]
    assert float(sft[1]["mtp_1 loss"]) < float(sft[0]["mtp_1 loss"])
    assert all(float(step["mtp grad norm"]) > 0.0 and step[names[2]] == "0" for step in sft)
    assert "mtp_1 loss" not in without[0]


def test_weights_and_biases_has_the_metrics(folder, sft):
    (file,) = folder.glob("wandb/**/*.wandb")
    written = file.read_bytes()  # names of metrics are plain text in it
    for name in ("mtp-grad-norm", "updates-skipped-for-grad-norm", "mtp_1 loss", "mtp_1_acceptance_rate"):
        assert name.encode() in written


def test_packed_answers_train_the_heads_for_acceptance(folder):
    steps = train(folder, "packed", *DETACHED, "model.mtp_loss_type=tv", *NO_CHECKPOINT)
    assert all(1.0 < float(step["mtp acceptance length"]) < 2.0 for step in steps)
    assert all(float(step["mtp grad norm"]) > 0.0 for step in steps)


def test_adapters_of_frozen_models_train_in_the_heads_alone(folder):
    """The second factor of an adapter starts as zeros."""
    train(folder, "lora", "model.freeze_base_model_for_mtp=True", "validation.eval_iters=0")
    saved = folder / "lora" / "checkpoints" / "iter_0000002"
    dcp_to_torch_save(saved, folder / "lora.pt")
    tensors = torch.load(folder / "lora.pt", weights_only=False)
    factors = [name for name in tensors if name.endswith("linear_out.weight") and not name.startswith("optimizer.")]
    head_factors = [name for name in factors if name.startswith("mtp.")]
    assert 0 < len(head_factors) < len(factors)
    assert [name for name in factors if tensors[name].any()] == head_factors


def test_adapters_are_clipped_separately(folder):
    steps = train(folder, "lora", *DETACHED, *NO_CHECKPOINT)
    assert all(0.0 < float(step["mtp grad norm"]) < float(step["grad norm"]) for step in steps)


def test_a_student_with_heads_learns_from_a_teacher_without(folder):
    """The teacher's loss does not depend on the heads, which learn from the labels. The student has experts."""
    detached = train(folder, "distill", *DETACHED, *EXPERTS, *NO_CHECKPOINT)
    without = train(folder, "distill", "model.disable_mtp_loss=True", *EXPERTS, *NO_CHECKPOINT)
    names = ("logits distillation loss", "grad norm")
    assert [float(step["load_balancing_loss"]) for step in (*detached, *without)] == pytest.approx([1.0] * 4)
    assert [[step[name] for name in names] for step in detached] == [[step[name] for name in names] for step in without]
    assert all(float(step["mtp grad norm"]) > 0.0 for step in detached)


def test_the_configuration_of_a_model_builder_has_the_settings():
    """Bridge 0.6 hands the attributes of a GPTModelConfig on to the configuration of the transformer."""
    builder = pytest.importorskip("megatron.bridge.models.gpt.gpt_builder", reason="Megatron-Bridge < 0.6")
    transformer = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, mtp_num_layers=1)
    described = builder.GPTModelConfig(transformer=transformer, vocab_size=512)
    described.mtp_detach_heads = True
    assert transformer.mtp_detach_heads is True
