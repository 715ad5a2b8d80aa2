"""Small random models of Hugging Face without MTP heads, as transformers saves them."""

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_scaling": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}


def save_bases(folder):
    """Save a DeepSeek-V3 in FOLDER/deepseek and a GLM-4.5 in FOLDER/glm, each in bfloat16 with a stray file."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    for name, model in (
        ("deepseek", DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **LATENT, num_nextn_predict_layers=0))),
        ("glm", Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **GROUPED, num_nextn_predict_layers=0))),
    ):
        model.bfloat16().save_pretrained(folder / name)
        (folder / name / "tokenizer_config.json").write_text("{}")
