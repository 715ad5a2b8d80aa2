"""Sparse attention (DSA)."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import has_sparse_attention, is_hybrid, microbatches
from ..defects.declare import Defect, Diff, Sign

_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
# 0.16 and 0.17 have the layers of sparse attention, and no model with them: building one ends in a ValueError.
_BUILDS_NO_SPARSE_ATTENTION = Sign(f"{_SPECS}:get_experimental_attention_variant_module_spec", lacks="'dsa'")


def _scales_indexer_loss(run: Any) -> bool:
    """True if the loss of the indexer should be scaled, as the main loss is."""
    is_mean = not run.calculate_per_token_loss and microbatches(run) > 1
    return bool(has_sparse_attention(run) and run.dsa_indexer_loss_coeff and (is_mean or run.fp16))


DEFECTS = (
    Defect(
        id="ML-4070",
        effect="The loss of the sparse attention's indexer is not divided by the number of microbatches, nor "
        "multiplied by the loss scale of FP16, so its gradients are as many times too large as a step has "
        "microbatches, and with --fp16 too small by the loss scale",
        severity=4,
        signs=Sign(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            lacks=("experimental_attention_variant", "DSAIndexerLossAutoScaler"),
        ),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=_scales_indexer_loss,
        when="--experimental-attention-variant dsa, or D layers of a hybrid model, with --dsa-indexer-loss-coeff, and "
        "with --fp16 or with several microbatches and no --calculate-per-token-loss",
        more_links=("NVIDIA/Megatron-LM#5244",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="scale-sparse-indexer-loss",
        diff=Diff(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            """
            if getattr(config, "experimental_attention_variant", None) == "dsa":
                from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

                indexer_loss_scale = torch.ones(1, device=torch.cuda.current_device())
                if config.grad_scale_func is not None:
                    indexer_loss_scale = config.grad_scale_func(indexer_loss_scale)
                if not config.calculate_per_token_loss:
                    cp_size = cp_group_size or parallel_state.get_context_parallel_world_size()
                    indexer_loss_scale = indexer_loss_scale * cp_size / num_microbatches
                DSAIndexerLossAutoScaler.set_loss_scale(indexer_loss_scale)
            """,
            "before",
            "(output_tensor, num_tokens)",
        ),
        second_reading="schedules of 0.18.2 and 0.19.0; the specs of 0.16.1 and 0.17.1, which build no sparse "
        "attention; what gives a hybrid model the setting; its program; doctor under its flags and just outside; the "
        "wrapper of its patch",
    ),
    Defect(
        id="ML-3026a",
        effect="The sparse attention's indexer gets the latent query before its normalization, unlike DeepSeek's",
        severity=3,
        signs=Sign(f"{_SPECS}:get_dsa_module_spec_for_backend", has="q_layernorm=IdentityOp"),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=lambda run: (  # a hybrid model has no such normalization
            run.experimental_attention_variant == "dsa" and run.qk_layernorm and not is_hybrid(run)
        ),
        when="--experimental-attention-variant dsa with --qk-layernorm in a GPT",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the layer specs of 0.16.1 to 0.19.0 and of hybrid models; the commit of #3026; its program on "
        "0.18.2; doctor under its flags",
    ),
    Defect(
        id="ML-3026b",
        effect="The sparse attention's indexer interleaves its rotary embeddings, unlike DeepSeek's, so it selects "
        "other tokens than those that the weights were trained for",
        severity=3,
        signs=Sign(
            "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
            has="multi_latent_attention=config.multi_latent_attention",
            lacks="mla_rotary_interleaved",
        ),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=lambda run: has_sparse_attention(run) and (run.load or run.pretrained_checkpoint),
        when="--experimental-attention-variant dsa, or D layers of a hybrid model, with --load or "
        "--pretrained-checkpoint",
        only_if="the weights come from another implementation, as DeepSeek's do",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the rotary embeddings of 0.18.2 and 0.19.0; the specs of 0.16.1 and 0.17.1, which build no "
        "sparse attention; its program on 0.18.2",
    ),
    Defect(
        id="indexer-loss-per-token",
        effect="The loss of the sparse attention's indexer is a mean over tokens, which is divided by the number of "
        "tokens of the step once more, so the gradients of the indexer are far too small",
        severity=3,
        signs=Sign(f"{_DSA}:compute_dsa_indexer_loss", has="indexer_loss = kl_div * loss_coeff", lacks="per_token"),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=lambda run: has_sparse_attention(run) and run.dsa_indexer_loss_coeff and run.calculate_per_token_loss,
        when="--experimental-attention-variant dsa, or D layers of a hybrid model, with --dsa-indexer-loss-coeff and "
        "--calculate-per-token-loss",
        instead="leave out --calculate-per-token-loss; then several microbatches need the patch "
        "scale-sparse-indexer-loss",
        state="fixed in 0.19.0",
        evidence="read",
        second_reading="the loss of the indexer and its scale in 0.18.2 and 0.19.0; what divides gradients by the "
        "number of tokens; the specs of 0.16.1 and 0.17.1, which build no sparse attention",
    ),
)
