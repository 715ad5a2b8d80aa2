"""ms-swift's own `megatron sft` trains MTP heads with the patches: a random Qwen2 of two layers over two ranks."""

import json
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from .byte_tokenizer import save_tokenizer

if find_spec("swift") is None:  # importing it here would import Megatron without a rehearsal
    pytest.skip("ms-swift is not installed", allow_module_level=True)

pytestmark = pytest.mark.forked("torch")

SCRIPT = Path(__file__).with_name("megatron_sft.py")
# transformers and Megatron in bf16: with another dtype ms-swift scales the loss. Its export to Hugging Face needs an
# attribute that the configurations of transformers 5.19 lack, with the patches or without.
ARGUMENTS = """
    --model_type qwen2 --template qwen2_5 --system be-brief --split_dataset_ratio 0.1 --load_from_cache_file false
    --micro_batch_size 2 --global_batch_size 4 --lr 1e-3 --max_length 256 --logging_steps 1 --dataloader_num_workers 0
    --torch_dtype bfloat16 --attention_backend unfused --perform_initialization true --save_safetensors false
    --add_version false --tensor_model_parallel_size 2
    --mtp_num_layers 1 --mtp_detach_heads true --mtp_clip_grad 0.05 --mtp_loss_type tv --mtp_logits_chunk_size 64
""".split()
METRICS = {"mtp_grad_norm", "updates_skipped_for_grad_norm", "mtp_updates_skipped_for_grad_norm", "mtp_1_loss"}
LENGTHS = {"mtp_acceptance_length", "mtp_greedy_acceptance_length"}
RATES = {"mtp_1_acceptance_rate", "mtp_1_cumulative_acceptance_rate"}


def make_model(folder):
    """A tokenizer of bytes, a random model in the format of Hugging Face, and a data set."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    save_tokenizer(folder / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    with (folder / "data.jsonl").open("w") as file:
        for number in range(64):
            question, answer = f"what is {number} plus one", f"it is {number + 1}, of course"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def sft(folder, output, iterations, *arguments):
    """Run it on two tensor-parallel ranks; return what it logged in training, and in its evaluation."""

    def run(*words):
        os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1", "LOCAL_WORLD_SIZE": "2"}
        os.chdir(folder)
        run_command("all", *words)

    words = ["run", "--device", "cpu", str(SCRIPT), "--model", "model", "--dataset", "data.jsonl", *ARGUMENTS]
    ended = run_ranks(2, partial(run, *words, "--output_dir", output, "--train_iters", str(iterations), *arguments))
    text = "".join(rank.output for rank in ended)
    assert {rank.code for rank in ended} == {0}, text[-6000:]
    logged = [json.loads(line) for line in (folder / output / "logging.jsonl").read_text().splitlines()]
    return [line for line in logged if "loss" in line], [line for line in logged if "eval_loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ms-swift")
    (ended,) = run_ranks(1, partial(make_model, folder))
    assert ended.code == 0, ended.output
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """Three steps without a skipped update, and a checkpoint."""
    return sft(folder, "trained", 3, "--grad_norm_skip_threshold", "100")


def test_its_log_has_the_metrics(trained):
    training, _ = trained
    assert [line["iteration"] for line in training] == ["1/3", "2/3", "3/3"]
    for line in training:
        assert line.keys() >= METRICS | RATES | LENGTHS
        assert line["mtp_grad_norm"] > 0 and line["updates_skipped_for_grad_norm"] == 0
    assert training[-1]["loss"] < training[0]["loss"] and training[-1]["mtp_1_loss"] < training[0]["mtp_1_loss"]


def test_its_evaluation_has_no_rates_that_were_not_measured(trained):
    _, (evaluation,) = trained
    assert not [name for name in evaluation if "acceptance" in name or "norm" in name]


def test_it_goes_on_from_its_checkpoint_through_a_skipped_update(folder, trained):
    checkpoint = ["--mcore_model", str(folder / "trained" / "checkpoint-3"), "--finetune", "false"]
    training, _ = sft(folder, "resumed", 5, *checkpoint, "--grad_norm_skip_threshold", "1e-3")
    assert [line["iteration"] for line in training] == ["4/5", "5/5"]
    assert [line["updates_skipped_for_grad_norm"] for line in training] == [1, 2]
    assert training[0]["loss"] < trained[0][0]["loss"]
