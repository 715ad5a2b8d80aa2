"""A small random GLM-4.5 of Hugging Face without MTP heads, as transformers saves it."""


def save_glm(folder):
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
