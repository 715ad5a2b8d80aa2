"""The commands of docs/add-heads-to-a-hugging-face-model.md, and the names that inference engines read."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_command, run_shown  # noqa: F401 - a fixture
from tests.pages import ROOT, shown
from tests.warm.processes import run_ranks

pytestmark = pytest.mark.forked("bridge")

SCRIPT = "scripts/hugging_face_heads.py"
PAGE = ROOT / "docs" / "add-heads-to-a-hugging-face-model.md"
# What the loaders of inference engines read of a head, a layer behind those of the model:
# * vLLM: vllm/model_executor/models/deepseek_mtp.py at 03356f8cb59b, glm4_moe_mtp.py at 028aedf62ade (load_weights with
#   _rewrite_spec_layer_name, and the parameters of the decoder layer before gate_proj and the like are stacked);
# * SGLang: python/sglang/srt/models/deepseek_nextn.py at 0114f9c923f2, deepseek_common/deepseek_weight_loader.py at
#   0201c04e9838, glm4_moe.py at 005ffc65dc0f (nextn_spec_weight_names, and the decoder layer's).
# Both also know copies of the embedding and of the output layer in the head. SGLang leaves them out; vLLM takes the
# model's (vllm/v1/spec_decode/llm_base_proposer.py at 00c4f22dae47, _maybe_share_lm_head).
HEAD = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
BLOCK = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.o_proj.weight",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    *(f"mlp.experts.{expert}.{name}" for expert in range(2) for name in PROJECTIONS),
    *(f"mlp.shared_experts.{name}" for name in PROJECTIONS),
}
LATENT = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
GROUPED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")
ATTENTION = {
    "deepseek": {f"self_attn.{name}.weight" for name in LATENT},
    "glm": {f"self_attn.{name}" for name in (*GROUPED, "q_norm.weight", "k_norm.weight")},
}
# Of these, some that Megatron has as they are: {their names there: those of engines}
MEGATRON = {
    "enorm.weight": "enorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
    "transformer_layer.self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "transformer_layer.mlp.router.weight": "mlp.gate.weight",
}
# vLLM: qwen3_next_mtp.py at 055e47c28003, with the decoder layer of qwen3_next.py; SGLang: qwen3_next_mtp.py at
# 00534216c5ba.
QWEN = {
    "mtp.fc.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight",
    *(f"mtp.layers.0.self_attn.{name}.weight" for name in ("q_norm", "k_norm", "o_proj", "q_proj", "k_proj", "v_proj")),
    "mtp.layers.0.mlp.gate.weight",
    "mtp.layers.0.mlp.shared_expert_gate.weight",
    *(f"mtp.layers.0.mlp.experts.0.{name}" for name in PROJECTIONS),
    *(f"mtp.layers.0.mlp.shared_expert.{name}" for name in PROJECTIONS),
}


def save_glm(folder):
    """Save a small random GLM-4.5 of Hugging Face without MTP heads, as transformers does."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        n_shared_experts=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        num_nextn_predict_layers=0,
    )
    Glm4MoeForCausalLM(config).bfloat16().save_pretrained(folder)


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")

    def save():
        os.chdir(folder)
        exec(re.search(r"```python\n(from transformers.*?)```", PAGE.read_text(), re.DOTALL)[1], {})
        save_glm(folder / "glm")
        for name in ("deepseek", "glm"):
            (folder / name / "tokenizer_config.json").write_text("{}")

    (ended,) = run_ranks(1, save)
    assert ended.code == 0, ended.output
    return folder


@pytest.mark.parametrize("name, heads", [("deepseek", 1), ("glm", 2)])
def test_the_commands_add_heads_that_engines_can_read(name, heads, bases, run_shown, tmp_path):  # noqa: F811
    commands = shown("hugging-face-heads").replace("$SMALL", f"$SMALL heads={heads}")
    commands = commands.replace("BASE=deepseek", f"BASE={bases / name}")
    trained, resumed, _, checked, export = run_shown(commands, {SCRIPT: [str(ROOT / SCRIPT)]})
    assert "has no MTP heads: they were initialized (last-layer). A run that resumes loads" in trained
    assert (
        len(re.findall(r" iteration +\d+/ +3 \|.* mtp_1 loss: \S+ \|.* mtp acceptance length: [1-3]\.", trained)) == 3
    )
    assert re.findall(r" iteration +(\d+)/ +6 \|", resumed) == ["4", "5", "6"]
    layers = range(2, 2 + heads)
    tensors = set(re.findall(r"^(model\.layers\.[2-9]\.\S+)$", checked, re.M))
    assert tensors == {f"model.layers.{layer}.{one}" for layer in layers for one in HEAD | BLOCK | ATTENTION[name]}
    summary = rf"{len(tensors)} tensors of heads, 0 of them not finite; \d+ of the model, 0 of them changed; 0 of all"
    assert re.search(f"{summary} differ after reading them back", checked)
    assert f"{len(tensors)} of {heads} MTP heads" in export and "Nothing wrong was found" in export
    out = tmp_path / "deepseek_exported"
    assert same_heads(tmp_path / "deepseek_heads" / "iter_0000006", out, heads)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == heads
    assert Path(out, "tokenizer_config.json").exists()


def test_a_misspelt_setting_is_refused_with_the_right_name(bases, tmp_path):
    words = (str(ROOT / SCRIPT), "train", str(bases / "deepseek"), str(tmp_path), "model.mtp_loss_tpye=tv")
    (ended,) = run_ranks(1, partial(run_command, "all", "run", "--device", "cpu", *words))
    assert ended.code == 1 and "model.mtp_loss_tpye: did you mean model.mtp_loss_type?" in ended.output


def same_heads(trained, exported, heads):
    """Whether the heads of a checkpoint of Megatron are those of the exported model, to the bit."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(trained, exported / "trained.pt")
    ours = torch.load(exported / "trained.pt", weights_only=False)
    theirs = {name: tensor for file in exported.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return all(
        torch.equal(ours[f"mtp.layers.{head}.{name}"].bfloat16(), theirs[f"model.layers.{2 + head}.{other}"].bfloat16())
        for head in range(heads)
        for name, other in MEGATRON.items()
    )


@pytest.mark.real_process("it needs neither torch nor Megatron")
@pytest.mark.parametrize(
    "words, reason",
    [
        ([], "the first word is train, export or check"),
        (["train"], "missing a required argument: 'base'"),
        (["export", "base", "heads", "out", "heads=2"], "unexpected keyword argument 'heads'"),
    ],
)
def test_wrong_words_are_answered_with_the_usage(words, reason):
    ended = subprocess.run([sys.executable, str(ROOT / SCRIPT), *words], capture_output=True, text=True)
    assert ended.returncode == 1 and reason in ended.stderr and "hugging_face_heads.py train BASE HEADS" in ended.stderr


@pytest.mark.real_process("it needs neither torch nor Megatron")
def test_another_number_of_heads_than_the_checkpoint_s_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    saved = tmp_path / "heads" / "iter_0000003"
    saved.mkdir(parents=True)
    (saved / "run_config.yaml").write_text("model: {mtp_num_layers: 1}")
    words = [sys.executable, str(ROOT / SCRIPT), "train", str(tmp_path), str(saved.parent), "heads=2"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"the checkpoint in {saved.parent} has 1 heads: give heads=1, or another folder" in ended.stderr


def test_bridge_s_names_of_qwen3_next_are_those_of_engines():
    from megatron.bridge.models.qwen.qwen3_next_bridge import Qwen3NextBridge

    mappings = Qwen3NextBridge().mapping_registry().mappings
    names = {name for mapping in mappings for name in _names(mapping.hf_param) if name.startswith("mtp.")}
    assert {name.replace("*", "0") for name in names} == QWEN


def _names(hf_param):
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())
