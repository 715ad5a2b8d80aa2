"""A random Qwen2 of two layers, data for it, and ms-swift's commands as forks of a process that has imported them."""

import json
import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_command
from tests.warm.processes import run_ranks

from ..byte_tokenizer import save_tokenizer

collect_ignore_glob = [] if find_spec("swift") else ["test_*.py"]

SCRIPT = Path(__file__).with_name("command.py")
# transformers and Megatron in bf16: with another dtype ms-swift scales the loss. Its export to Hugging Face needs an
# attribute that the configurations of transformers 5.19 lack, with the patches or without.
ARGUMENTS = """
    --model model --model_type qwen2 --template qwen2_5 --load_from_cache_file false
    --micro_batch_size 2 --global_batch_size 4 --lr 1e-3 --max_length 256 --logging_steps 1 --dataloader_num_workers 0
    --torch_dtype bfloat16 --attention_backend unfused --perform_initialization true --save_safetensors false
    --add_version false --mtp_num_layers 1
""".split()


@dataclass
class Logged:
    """The lines of logging.jsonl about losses of the training, those about losses of the evaluation, and all output."""

    training: list[dict]
    evaluation: list[dict]
    output: str


def save_data(folder):
    """Questions with answers: sft.jsonl, dpo.jsonl with answers to reject, and pt.jsonl as texts."""
    rows = {"sft": [], "dpo": [], "pt": []}
    for number in range(64):
        question, answer = f"what is {number} plus one", f"it is {number + 1}, of course"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows["sft"].append({"messages": messages})
        rows["dpo"].append({"messages": messages, "rejected_response": "no"})
        rows["pt"].append({"messages": [{"role": "assistant", "content": f"{question}: {answer}"}]})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tokenizer of bytes, the model in the format of Hugging Face, and the data. Runs are forks of this process."""
    os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1"}
    import megatron_mtp_patches
    import tqdm
    from megatron_mtp_patches import rehearsal

    tqdm.tqdm.monitor_interval = 0  # it would start a thread, with which no fork is safe
    rehearsal.install()
    megatron_mtp_patches.apply()
    from swift.megatron import megatron_sft_main  # noqa: F401
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("ms-swift")
    save_tokenizer(folder / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    save_data(folder)
    return folder


@pytest.fixture(scope="session")
def megatron(folder):
    """megatron(command, data, output, steps, *arguments, ranks=1, fault=..., refused=False): what it Logged.

    `fault` acts on each rank before the run. If the run is to be refused, return its output.
    """

    def enter(ranks, fault, *words):
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        os.chdir(folder)
        fault()
        run_command("all", *words)

    def run(command, data, output, steps, *arguments, ranks=1, fault=lambda: None, refused=False):
        words = ["run", "--device", "cpu", str(SCRIPT), command, "--dataset", f"{data}.jsonl", *ARGUMENTS]
        words += ["--output_dir", output, "--train_iters", str(steps), *arguments]
        ended = run_ranks(ranks, partial(enter, ranks, fault, *words))
        text = "".join(rank.output for rank in ended)
        codes = {rank.code for rank in ended}
        assert 1 in codes if refused else codes == {0}, text[-6000:]  # ranks are killed when another one ends with 1
        if refused:
            return text
        lines = [json.loads(line) for line in (folder / output / "logging.jsonl").read_text().splitlines()]
        return Logged([line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line], text)

    return run
