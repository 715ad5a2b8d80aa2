"""`parity` on a configuration of verl: verl's own worker and engine train the actor's model, on each cut."""

import json
from pathlib import Path

import pytest
import yaml

from ..bridge_load import SIZES
from ..parity import compare, explanations

pytestmark = [pytest.mark.forked("torch")]

# As Hugging Face writes it; parity reads no weights.
MODEL = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000.0,
}
ROLE = "actor_rollout_ref"


@pytest.fixture
def write(tmp_path):
    """write(name, model={}, **engine): verl's own configuration of PPO, changed."""
    import verl

    composed = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_megatron_trainer.yaml"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))

    def write_file(name, model=(), **engine):
        content = yaml.safe_load(composed.read_text())
        content["algorithm"]["adv_estimator"] = "grpo"  # without a critic
        content[ROLE]["model"] |= {"path": str(tmp_path / "model"), **dict(model)}
        content[ROLE]["model"]["mtp"] |= {"enable": True, "enable_train": True}
        content[ROLE]["actor"]["megatron"] |= {"tensor_model_parallel_size": 2, **engine}
        (tmp_path / name).write_text(yaml.safe_dump(content))
        return tmp_path / name

    return write_file


@pytest.fixture
def write_sft(write, tmp_path):
    """write_sft(name, *words): what verl's SFT trainer composes, of the same model."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    def write_file(name, *words):
        words = ["engine=megatron", "optim=megatron", f"model.path={tmp_path / 'model'}", *words]
        with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
            OmegaConf.save(compose("sft_trainer_engine", overrides=words), tmp_path / name)
        return tmp_path / name

    return write_file


def test_a_defect_of_a_cut_is_named_and_goes_away_with_the_patches(write, write_sft, tmp_path):
    refused = {
        "the run trains adapters (`lora`)": write("lora.yaml", {"lora_rank": 8}),
        "set megatron.vanilla_mbridge to false": write("mbridge.yaml", vanilla_mbridge=True),
        "Megatron-Bridge reads no model from model.path": write("absent.yaml", {"path": str(tmp_path / "absent")}),
    }
    layout = [f"engine.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")]
    sft = write_sft("sft.yaml", "model.mtp.enable=true", "model.mtp.enable_train=true", *layout)
    files = [write("config.yaml", pipeline_model_parallel_size=2, param_offload=True), sft, *refused.values()]
    code, answer = compare(files, tmp_path, "--cut", "TP2 with SP", "--cut", "PP2")
    assert code == 1
    run, run_of_sft, *others = answer
    assert explanations(run) == {"TP2 with SP": {"ML-5916"}} and len(run["cuts"]) == 2
    assert all(cut["goes_away_with_all_patches"] for cut in run["cuts"] if cut["findings"])
    assert explanations(run_of_sft) == {"TP2 with SP": {"ML-5916"}} and len(run_of_sft["cuts"]) == 2
    assert {"param_offload True"} <= {flag for flags in run["left_out"].values() for flag in flags}
    for why, one in zip(refused, others, strict=True):
        assert why in one["refused"]
