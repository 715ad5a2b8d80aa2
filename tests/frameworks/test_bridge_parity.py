"""`parity` on a run_config.yaml: Megatron-Bridge's own `pretrain` trains what its provider builds, on each cut."""

import pytest
import yaml

from .parity import compare, explanations

pytestmark = [pytest.mark.forked("torch")]

CONFIG = "megatron.bridge.training.config"
RUN = {
    "model": {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "num_layers": 24,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 16,
        "seq_length": 4096,
        "vocab_size": 32000,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "add_bias_linear": False,
        "num_moe_experts": 64,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "moe_ffn_hidden_size": 1024,
        "moe_token_dispatcher_type": "alltoall",
        "mtp_num_layers": 1,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        # which a run leaves in the file that it saves
        "grad_scale_func": {
            "_target_": "megatron.core.optimizer.optimizer.MegatronOptimizer.scale_loss",
            "_call_": False,
        },
        "timers": {"_target_": "megatron.core.timers.Timers", "_call_": True},
    },
    "optimizer": {"_target_": f"{CONFIG}.OptimizerConfig", "optimizer": "adam", "lr": 1e-4, "clip_grad": 1.0},
    "ddp": {"_target_": f"{CONFIG}.DistributedDataParallelConfig", "use_distributed_optimizer": True},
    "mixed_precision": "bf16_with_fp8_delayed_scaling_mixed",
    "dataset": {"_target_": f"{CONFIG}.GPTDatasetConfig", "seq_length": 4096},
}
TOKENS = {"ML-7513", "ML-7513b"}  # each context-parallel rank divides its losses by its own number of tokens
NAMED = {
    "0.18.2": {"TP2 with SP": {"ML-5916"}, "CP2 by p2p": TOKENS},
    "0.19.2": {"CP2 by p2p": TOKENS},
}


# The settings of a run that is refused, and why.
REFUSED = [
    ({"model": {"mtp_loss_type": "tv"}}, "model.mtp_loss_type comes with the patch "),
    ({"model": {"num_layerz": 24}}, "model.num_layerz: the GPTModelProvider that is installed has no such field"),
    ({"peft": {"dim": 8}}, "the run trains adapters (`peft`)"),
    ({"model": {"_target_": f"{CONFIG}.OptimizerConfig"}}, "`model` is no provider of Megatron-Bridge"),
]


def write(file, settings=()):
    sections = {**RUN, **dict(settings)}
    file.write_text(yaml.safe_dump({**sections, "model": {**RUN["model"], **sections["model"]}}))
    return file


def test_defects_of_cuts_are_named_and_go_away_with_the_patches(tmp_path, release):
    files = [write(tmp_path / "run_config.yaml")]
    files += [write(tmp_path / f"{number}.yaml", settings) for number, (settings, _) in enumerate(REFUSED)]
    code, answer = compare(files, tmp_path, "--cut", "TP2 with SP", "--cut", "CP2 by p2p")
    assert code == 1
    run, *refused = answer
    assert explanations(run) == NAMED[release]
    assert all(cut["goes_away_with_all_patches"] for cut in run["cuts"] if cut["findings"])
    begins = {cut["name"]: cut["begins"] for cut in run["cuts"]}
    assert begins["CP2 by p2p"]["kind"] == "gradient of the hidden state"
    left_out = {flag for flags in run["left_out"].values() for flag in flags}
    assert {"dataset", "model.fp8 hybrid"} <= left_out
    for one, (_, why) in zip(refused, REFUSED, strict=True):
        assert why in one["refused"]
