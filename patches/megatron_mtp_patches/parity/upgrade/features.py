"""The settings of features that a run does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...defects.conditions import has_low_precision, has_sparse_attention, is_layer_wise

_SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def _trains_by_rl(run: Any) -> object:
    return run.perform_rl_step


def _dispatches_flexibly(run: Any) -> object:
    return run.num_experts and run.moe_token_dispatcher_type == "flex"


# How the names of its settings begin, and whether a run uses the feature. A setting may belong to several.
FEATURES: dict[tuple[str, ...], Callable[[Any], object]] = {
    # RL is the only training that generates text
    ("rl_", "grpo_", "inference_dynamic_", "inference_cuda_", "inference_moe_", "inference_grouped_"): _trains_by_rl,
    ("offset_sampling_seed_",): _trains_by_rl,
    ("logits_load_",): lambda run: run.logits_load_dir,
    ("logits_save_",): lambda run: run.logits_save_dir,
    ("null_tokenizer_",): lambda run: run.tokenizer_type == "NullTokenizer",
    ("tokenizer_hf_",): lambda run: run.tokenizer_type == "HuggingFaceTokenizer",
    ("tokenizer_sentencepiece_",): lambda run: run.tokenizer_type in _SENTENCE_PIECE,
    ("muon_",): lambda run: "muon" in str(run.optimizer),
    ("adaptive_muon_",): lambda run: run.optimizer == "adaptive_muon",
    ("soap_",): lambda run: run.optimizer == "soap",
    ("use_layer_wise_",): is_layer_wise,
    ("moe_",): lambda run: run.num_experts,
    ("moe_deepep_", "moe_hybridep_", "moe_ncclep_", "moe_flex_"): _dispatches_flexibly,
    ("moe_paged_stash",): lambda run: run.moe_paged_stash,
    ("dsa_",): has_sparse_attention,
    ("cuda_graph_",): lambda run: run.cuda_graph_impl not in (None, "none"),
    ("data_parallel_sharding_", "outer_dp_sharding_", "megatron_fsdp_", "fsdp_"): lambda run: run.use_megatron_fsdp,
    ("activation_offload_",): lambda run: run.fine_grained_activation_offloading,
    ("tensor_parallel_num_weight_", "gtp_weight_"): lambda run: (run.gtp_weight_remat_size or 1) > 1,
    ("expert_tensor_parallel_num_weight_", "expert_gtp_weight_"): lambda run: (
        (run.expert_gtp_weight_remat_size or 1) > 1
    ),
    ("stream_ckpt_dequant",): has_low_precision,
}


def find_unused(names: Iterable[str], run: Any) -> Iterator[str]:
    """Yield those of these settings that belong to a feature that the run does not use.

    Args:
        names: of settings.
        run: its settings (doctor.findings.RunSettings).
    """
    unused = tuple(start for starts, uses in FEATURES.items() if not uses(run) for start in starts)
    return (name for name in names if name.startswith(unused))
