"""Load small random DeepSeek-V3 models of Hugging Face by Megatron-Bridge, on two ranks.

    torchrun --nproc-per-node 2 bridge_load.py FOLDER

Their configuration declares an MTP head. Prints what comes of one with the head, of one without, which is loaded as
Bridge loads it and initialized in each way, and of one with a part of the head; and what its export says.
"""

import sys
from pathlib import Path

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
}


def save(folder, heads=1):
    """Save a model without the MTP heads that it declares, as transformers does, in FOLDER/lacking.

    FOLDER/whole has them, by the names of DeepSeek-V3's own checkpoint, FOLDER/partial without the first projection.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**SIZES, num_nextn_predict_layers=heads, rope_scaling=None)
    model = DeepseekV3ForCausalLM(config).bfloat16()
    for name in ("lacking", "whole", "partial"):
        model.save_pretrained(folder / name)
    (file,) = (folder / "whole").glob("*.safetensors")
    weights = load_file(file)
    layers = SIZES["num_hidden_layers"]
    last = f"model.layers.{layers - 1}."
    body = {name.removeprefix(last): value for name, value in weights.items() if name.startswith(last)}
    for number in range(layers, layers + heads):
        head = {name: value.clone() for name, value in body.items()}
        head["eh_proj.weight"] = torch.randn(64, 128).bfloat16()
        head |= {f"{norm}.weight": torch.ones(64).bfloat16() for norm in ("enorm", "hnorm", "shared_head.norm")}
        weights |= {f"model.layers.{number}.{name}": value for name, value in head.items()}
    save_file(weights, file, metadata={"format": "pt"})
    del weights[f"model.layers.{layers}.eh_proj.weight"]
    save_file(weights, folder / "partial" / file.name, metadata={"format": "pt"})


def load(folder, **settings):
    """Return what comes of loading FOLDER, and the model, or None."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=True)
    settings = {
        "pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "moe_shared_expert_overlap": False,
    } | settings
    for name, value in settings.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    try:
        provider.finalize()
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(seed=0)
        chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    except ValueError as error:
        return f"refused: {error}", None, None
    return "loaded", unwrap_model(chunks)[0], lambda: dict(bridge.export_hf_weights(chunks, show_progress=False))


def describe_last_layer(model):
    """Whether each tensor of the head's layer and of its norm is that of the end of the main model."""
    import torch

    if not getattr(model, "mtp_process", False):
        return "no head here"
    (head,) = model.mtp.layers
    last = model.decoder.layers[-1]
    pairs = [(head.mtp_model_layer, last), (head.final_layernorm, model.decoder.final_layernorm)]
    states = [(one.state_dict(), other.state_dict()) for one, other in pairs]
    is_copy = all(
        torch.equal(one[name], other[name])
        for one, other in states
        for name in one
        if isinstance(one[name], torch.Tensor) and not name.endswith("_extra_state")
    )
    return f"{sum(len(one) for one, _ in states)} tensors, copies: {is_copy}"


def describe_random(model):
    """Whether the parameters of the head are finite and not zero; and the norm of one that all ranks have whole."""
    (head,) = model.mtp.layers
    is_right = all(bool(param.isfinite().all()) and bool(param.any()) for param in head.parameters())
    return f"finite {is_right}, router {float(head.mtp_model_layer.mlp.router.weight.float().norm()):.9f}"


def export_without_heads(folder, model):
    """What comes of an export whose configuration declares no heads: Bridge 0.6.2 ends in an AttributeError."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder / "lacking")
    config.num_nextn_predict_layers = 0
    try:
        exported = dict(AutoBridge.from_hf_config(config).export_hf_weights([model], show_progress=False))
    except AttributeError:
        return 0
    return sum("layers.2." in name for name in exported)


def main(folder):
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("nccl")
    folder = Path(folder)
    rank = torch.distributed.get_rank()
    if rank == 0:
        save(folder)
    torch.distributed.barrier()
    for title, name, settings in (
        ("whole", "whole", {"mtp_init": "last-layer"}),
        ("initialized", "lacking", {"perform_initialization": True}),
        ("lacking", "lacking", {}),
        ("partial", "partial", {"mtp_init": "random"}),
    ):
        print(f"rank {rank}, {title}: {load(folder / name, **settings)[0]}", flush=True)
    _, model, _ = load(folder / "lacking", mtp_init="last-layer")
    print(f"rank {rank}, last-layer: {describe_last_layer(model)}", flush=True)
    parallel_state.destroy_model_parallel()
    one_stage = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}
    _, model, export = load(folder / "lacking", mtp_init="random", **one_stage)
    print(f"rank {rank}, random: {describe_random(model)}", flush=True)
    print(f"rank {rank}, exported heads: {sum('layers.2.' in name for name in export())}", flush=True)
    print(f"rank {rank}, exported by a configuration without heads: {export_without_heads(folder, model)}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvrx"))
    main(*sys.argv[1:])
