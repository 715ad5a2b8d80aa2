"""Load small random DeepSeek-V3 models of Hugging Face by Megatron-Bridge, on two pipeline stages.

    torchrun --nproc-per-node 2 bridge_load.py FOLDER

Their configuration declares an MTP head. Prints what comes of one with the head and of one without, which is loaded
once as Bridge loads it and once initialized.
"""

import sys
from pathlib import Path

SIZES = {
    "vocab_size": 128,
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


def save(folder):
    """Save a model without the head that it declares, as transformers does, in FOLDER/lacking; FOLDER/whole has it."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, num_nextn_predict_layers=1, rope_scaling=None)).bfloat16()
    for name in ("lacking", "whole"):
        model.save_pretrained(folder / name)
    (file,) = (folder / "whole").glob("*.safetensors")
    weights = load_file(file)
    last = f"model.layers.{SIZES['num_hidden_layers'] - 1}."
    head = f"model.layers.{SIZES['num_hidden_layers']}."
    weights |= {head + name[len(last) :]: value.clone() for name, value in weights.items() if name.startswith(last)}
    weights[f"{head}eh_proj.weight"] = torch.randn(64, 128).bfloat16()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{head}{norm}.weight"] = torch.ones(64).bfloat16()
    save_file(weights, file, metadata={"format": "pt"})


def load(folder, **settings):
    """Return what comes of loading FOLDER."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
    settings |= {
        "pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "moe_shared_expert_overlap": False,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    try:
        provider.finalize()
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(seed=0)
        provider.provide_distributed_model(wrap_with_ddp=False)
    except ValueError as error:
        return f"refused: {error}"
    return "loaded"


def main(folder):
    import torch

    torch.distributed.init_process_group("nccl")
    folder = Path(folder)
    rank = torch.distributed.get_rank()
    if rank == 0:
        save(folder)
    torch.distributed.barrier()
    print(f"rank {rank}, whole: {load(folder / 'whole')}", flush=True)
    print(f"rank {rank}, initialized: {load(folder / 'lacking', perform_initialization=True)}", flush=True)
    print(f"rank {rank}, lacking: {load(folder / 'lacking')}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvrx"))
    main(*sys.argv[1:])
