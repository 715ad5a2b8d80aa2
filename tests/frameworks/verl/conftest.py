"""verl's own workers, around an engine that verl builds from a small random DeepSeek-V3 with one MTP head."""

import functools
import shutil

import pytest

from ..bridge_load import SIZES, save
from ..byte_tokenizer import save_tokenizer

PROMPTS, RESPONSES = (5, 8, 3, 6), (12, 7, 9, 11)  # tokens of the four samples of a batch
TRAINED_HEADS = {"enable": True, "enable_train": True}
# What the kernels that are missing on a CPU would do. Bridge has this model's cross entropy done by TransformerEngine,
# whose kernel the rehearsal interprets wrongly in bf16.
REHEARSED = {
    "gradient_accumulation_fusion": False,
    "moe_shared_expert_overlap": False,
    "attention_backend": "fused",
    "cross_entropy_fusion_impl": "native",
}


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """save_model(heads): the folder of a model of Hugging Face that has these MTP heads, and a tokenizer."""

    import torch

    @functools.cache
    def save_once(heads):
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp("model")
        save(folder, heads)
        save_tokenizer(folder / "whole")
        return folder / "whole"

    return save_once


@pytest.fixture
def lacking(save_model):
    """The folder of one that lacks the head which its config.json declares."""
    folder = save_model(1).with_name("lacking")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def lacking_hybrid_model(tmp_path_factory):
    """The folder of a Nemotron-H without Mamba layers, whose kernels no CPU runs. It lacks the MTP head it declares."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    folder = tmp_path_factory.mktemp("hybrid")
    config = NemotronHConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layers_block_type=["attention", "mlp"],
        num_nextn_predict_layers=1,
        mtp_layers_block_type=["attention", "mlp"],
    )
    NemotronHForCausalLM(config).bfloat16().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def hybrid_model(lacking_hybrid_model, tmp_path_factory):
    """The same model with its head, which is the main model's attention and MLP again, and a random projection."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("hybrid_with_head")
    shutil.copytree(lacking_hybrid_model, folder, dirs_exist_ok=True)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    layers = {name: value for name, value in weights.items() if ".layers." in name}
    head = {f"mtp.{name[name.index('layers.') :]}": value.clone() for name, value in layers.items()}
    head["mtp.layers.0.eh_proj.weight"] = torch.randn(64, 128).bfloat16()
    for norm in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        head[f"mtp.layers.{norm}.weight"] = torch.ones(64).bfloat16()
    save_file(weights | head, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def make_worker(save_model):
    """make_worker(model={}, optimizer={}, mtp=..., name="adam", heads=1, path=None, checkpoint={}, **engine):
    verl's TrainingWorker.

    Its engine is built; it trains by ppo_loss. `model` is verl's override_transformer_config, `optimizer` its
    override_optimizer_config, `mtp` its switches of MTP, `name` that of the optimizer, `path` the model of Hugging
    Face, or `heads` how many MTP heads the small DeepSeek-V3 has, `checkpoint` and `engine` fields of verl's
    McoreCheckpointConfig and McoreEngineConfig.
    """
    from functools import partial

    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from verl.workers.config import (
        ActorConfig,
        HFModelConfig,
        McoreCheckpointConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.config.model import MtpConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    def make(model=(), optimizer=(), mtp=TRAINED_HEADS, name="adam", heads=1, path=None, checkpoint=(), **engine):
        MTPLossLoggingHelper.tracker = {}  # it has the size of the heads of an earlier worker
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=str(path or save_model(heads)), use_remove_padding=True, mtp=MtpConfig(**mtp)
                ),
                engine_config=McoreEngineConfig(
                    override_transformer_config={**REHEARSED, **dict(model)},
                    vanilla_mbridge=False,
                    use_dynamic_bsz=False,
                    infer_micro_batch_size_per_gpu=2,
                    **{"sequence_parallel": False, "micro_batch_size_per_gpu": 2, **engine},
                ),
                optimizer_config=McoreOptimizerConfig(
                    optimizer=name,
                    lr=1e-2,
                    clip_grad=1.0,
                    weight_decay=0.0,
                    lr_warmup_steps=0,
                    total_training_steps=10,
                    override_optimizer_config=dict(optimizer),
                ),
                checkpoint_config=McoreCheckpointConfig(**dict(checkpoint)),
            )
        )
        worker.reset()
        actor = ActorConfig(
            strategy="megatron",
            rollout_n=1,
            ppo_mini_batch_size=4,
            ppo_micro_batch_size_per_gpu=2,
            use_dynamic_bsz=False,
        )
        worker.set_loss_fn(partial(ppo_loss, config=actor))
        return worker

    return make


@pytest.fixture
def make_batch():
    """make_batch(seed=0, mini_batch_size=4): four samples as verl's PPO trainer gives them to its workers, packed."""
    import torch
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    def make(seed=0, mini_batch_size=4):
        generator = torch.Generator().manual_seed(seed)
        longest, width = max(PROMPTS), max(PROMPTS) + max(RESPONSES)
        mask = torch.zeros(len(PROMPTS), width, dtype=torch.long)
        for row, prompt, response in zip(mask, PROMPTS, RESPONSES, strict=True):
            row[longest - prompt : longest + response] = 1
        tokens = mask * torch.randint(3, SIZES["vocab_size"], mask.shape, generator=generator)
        tensors = {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(0),
            "prompts": tokens[:, :longest],
            "responses": tokens[:, longest:],
            "response_mask": mask[:, longest:],
        }
        others = {
            "mini_batch_size": mini_batch_size,
            "global_batch_size": mini_batch_size,
            "epochs": 1,
            "seed": 1,
            "dataloader_kwargs": {"shuffle": False},
            "temperature": 1.0,
            "calculate_entropy": False,
        }
        return left_right_2_no_padding(tensordict_utils.get_tensordict(tensors, others))

    return make
