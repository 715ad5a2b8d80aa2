"""Conditions on the settings of a run that several defects share."""

from __future__ import annotations

from typing import Any

from .declare import Gap


def tensor_parallel(run: Any) -> int:
    """Over how many ranks a dense layer is split."""
    return run.tensor_model_parallel_size or 1


def pipeline_parallel(run: Any) -> int:
    """The number of pipeline stages."""
    return run.pipeline_model_parallel_size or 1


def has_middle_stages(run: Any) -> bool:
    """True if some stage is neither the first nor the last one; virtual stages count."""
    return bool(pipeline_parallel(run) * (run.virtual_pipeline_model_parallel_size or 1) > 2)


def context_parallel(run: Any) -> int:
    """Over how many ranks a sequence is split."""
    return run.context_parallel_size or 1


def expert_parallel(run: Any) -> int:
    """Over how many ranks the experts of a layer are dealt out."""
    return run.expert_model_parallel_size or 1


def expert_tensor_parallel(run: Any) -> int:
    """Over how many ranks each expert is split."""
    return run.expert_tensor_parallel_size or tensor_parallel(run)


def data_parallel(run: Any) -> int:
    """The number of replicas of the dense layers, without those of context parallelism; 1 if unknown."""
    ranks = run.world_size or 1
    return run.data_parallel_size or max(
        1, ranks // (tensor_parallel(run) * pipeline_parallel(run) * context_parallel(run))
    )


def microbatches(run: Any) -> int:
    """The number of microbatches of a step; 1 if unknown."""
    if not run.global_batch_size or not run.micro_batch_size:
        return 1
    return max(1, run.global_batch_size // (run.micro_batch_size * data_parallel(run)))


def masks_loss(run: Any) -> bool:
    """True if the loss of MTP layers leaves out positions inside a sequence; a trainer that has no `--sft` may."""
    return bool(run.sft is not False or run.eod_mask_loss or run.dataloader_inter_document_masking)


def shares_gradient_buffer(run: Any) -> bool:
    """True if MXFP8 parameters are gathered through the buffer of the gradients, as a distributed Adam does it."""
    shares = run.fp8_recipe == "mxfp8" and run.fp8_param_gather and run.reuse_grad_buf_for_mxfp8_param_ag
    return bool(shares and not (run.use_megatron_fsdp or is_layer_wise(run)))


def loads_optimizer(run: Any) -> bool:
    """True if the run resumes with the state of an optimizer."""
    return bool(run.load and not (run.no_load_optim or run.finetune))


def loads_model_only(run: Any) -> bool:
    """True if the run starts from the weights of a checkpoint without its optimizer."""
    return bool(run.pretrained_checkpoint or (run.load and (run.finetune or run.no_load_optim)))


def has_torch_dist_format(run: Any) -> bool:
    """True if checkpoints have the format torch_dist, which is the default."""
    return (run.ckpt_format or "torch_dist") == "torch_dist"


def is_layer_wise(run: Any) -> bool:
    """True if ranks share out whole parameters: dist_muon, which 0.19 reads as muon with this setting."""
    return bool(run.use_layer_wise_distributed_optimizer) or str(run.optimizer).startswith("dist_")


def has_heads_on_last_stage(run: Any) -> bool:
    """True if the MTP heads are on the last pipeline stage, as they are unless a layout puts them on another one."""
    layout = run.pipeline_model_parallel_layout
    layout = getattr(layout, "input_data", layout)  # Megatron's object keeps what it was made of
    if not run.mtp_num_layers or not layout:
        return bool(run.mtp_num_layers)
    if isinstance(layout, str):  # "Et*2|(t|)*2tm|L"
        return "m" in layout.rpartition("|")[2]
    return any(str(getattr(layer, "name", layer)).strip().lower() == "mtp" for layer in layout[-1])


def recomputes_heads(run: Any) -> bool:
    """True if the MTP heads run again in backward; `--recompute-method block` leaves them out."""
    return bool(run.mtp_num_layers and run.recompute_granularity == "full" and run.recompute_method != "block")


def recomputes_weights(run: Any) -> bool:
    """True if parts of layers that have weights run again in backward; core_attn and moe_act have none."""
    modules = run.recompute_modules or ["core_attn"]
    is_part = run.recompute_granularity == "selective" and not {"core_attn", "moe_act"}.issuperset(modules)
    return run.recompute_granularity == "full" or is_part


def has_head_of_bridge(run: Any) -> bool:
    """True if Megatron-Bridge or mcore-bridge, of ms-swift, replaces the recomputation of MTP heads."""
    return bool(run.is_of_megatron_bridge or run.is_of_ms_swift or (run.is_of_verl and not run.vanilla_mbridge))


def has_heads_of_trainer(run: Any) -> bool:
    """True if verl or ms-swift recomputes MTP heads by its own code, and on 0.16 computes their loss by it."""
    return bool(run.is_of_verl or run.is_of_ms_swift)


def repeats_a_head(run: Any) -> bool:
    """True if one MTP head runs for several depths."""
    return bool(run.mtp_use_repeated_layer and (run.mtp_num_layers or 0) > 1)


# What avoids defects of --overlap-moe-expert-parallel-comm.
WITHOUT_OVERLAP_OF_EXPERTS = (
    "leave out --overlap-moe-expert-parallel-comm, and --delay-wgrad-compute and "
    "--ep-overlap-early-attn-memory-release, which need it"
)

# `only_if` of the defects of weight gradients that are fused under Megatron-FSDP: NVIDIA/Megatron-LM#3822.
FUSES_UNDER_MEGATRON_FSDP = (
    "Megatron is 0.18 or newer, or gradients have the type of the weights (--grad-reduce-in-bf16); else the first "
    "backward pass ends in an error"
)

# Where patches that add gradients up under Megatron-FSDP leave its own sums.
RECOMPUTES_DEPTHS = Gap(
    lambda run: repeats_a_head(run) and recomputes_heads(run),
    when="--mtp-use-repeated-layer and --recompute-granularity full with --recompute-method uniform",
    because="each recomputed depth has a backward pass of its own (fsdp-recomputed-repeated-head)",
)


def experts_of_hybrid_head(run: Any) -> str:
    """The layers of a hybrid model's head up to its last one with experts; '' where it has none."""
    _, _, heads = (run.hybrid_layer_pattern or "").partition("/")
    before, experts, _ = heads.partition("/")[0].rpartition("E")
    return before + experts


def heads_have_experts(run: Any) -> bool:
    """True if the MTP heads have experts; those of a GPT do if its last layer, which they are like, has some."""
    if not (run.num_experts and run.mtp_num_layers):
        return False
    if run.hybrid_layer_pattern:
        return bool(experts_of_hybrid_head(run))
    frequency = run.moe_layer_freq
    if isinstance(frequency, str):  # "2" or "([0]*1+[1]*23)": a configuration that Megatron's parser has not read
        last = frequency.rpartition("[")[2].partition("]")[0].split(",")[-1:]
        frequency = last if "[" in frequency else int(frequency)
    if isinstance(frequency, (list, tuple)):
        return bool(int(frequency[-1]))
    return ((run.num_layers or 1) - 1) % (frequency or 1) == 0


# Where detach-mtp-heads does not start.
REFUSES_DEFERRED_GRADIENTS = Gap(
    lambda run: run.defer_embedding_wgrad_compute,
    when="--defer-embedding-wgrad-compute",
    because="it refuses that flag with detached heads",
)


def fuses_weight_gradients(run: Any) -> bool:
    """True if a backward pass adds weight gradients to `main_grad` itself, as it does by default."""
    return run.gradient_accumulation_fusion is not False


def has_aux_loss(run: Any, *kinds: str) -> bool:
    """True if one of these losses balances the load of experts: "aux_loss", "seq_aux_loss", "global_aux_loss"."""
    named, weights = run.moe_router_load_balancing_type, run.moe_aux_loss_coeff
    named = list(named) if isinstance(named, (list, tuple)) else [named]
    weights = list(weights) if isinstance(weights, (list, tuple)) else [weights] * len(named)
    return bool(run.num_experts) and any(kind in kinds and weight for kind, weight in zip(named, weights, strict=False))


def has_any_aux_loss(run: Any) -> bool:
    """True if any loss balances the load of experts."""
    return has_aux_loss(run, "aux_loss", "seq_aux_loss", "global_aux_loss")


def has_z_loss(run: Any) -> bool:
    """True if the logits of routers have a separate loss."""
    return bool(run.num_experts and run.moe_z_loss_coeff)


def layers_of_hybrid(run: Any) -> str:
    """The kinds of layers of a hybrid model, one letter each; '' for other models."""
    return str(run.hybrid_layer_pattern or run.hybrid_override_pattern or "")


# Flags of scripts for vision-language models, by which `doctor -- FLAGS`, which is not told the script, knows them.
VLM_FLAGS = ("freeze_LM", "freeze_ViT", "disable_vision_class_token", "dataloader_seq_length")


# Those of scripts that build models of ModelOpt, as pretrain_gpt.py does where it finds ModelOpt.
MODELOPT_FLAGS = ("modelopt_enabled", "export_kd_teacher_load", "export_default_te_spec")


def is_vlm(run: Any) -> bool:
    """True if pretrain_vlm.py trains a vision-language model, or a script with its flags whose name is not known."""
    return run.script in (None, "pretrain_vlm.py") and any(getattr(run, name) is not None for name in VLM_FLAGS)


def is_hybrid(run: Any) -> bool:
    """True if the model is a hybrid one, of Mamba and other layers."""
    return bool(layers_of_hybrid(run) or run.is_hybrid_model)


# `only_if` of the defects whose predicate asks may_mask_padding.
HAS_PADDING_MASK = (
    "the model gets a padding mask, which neither Megatron's trainer nor Megatron-Bridge gives it, and verl only with "
    "dynamic context parallelism"
)


def may_mask_padding(run: Any) -> bool:
    """True if the model may get a padding mask, as far as its trainer is known."""
    is_known_to_give_none = run.is_of_megatron_trainer or run.is_of_megatron_bridge
    return not (is_known_to_give_none or (run.is_of_verl and not run.dynamic_context_parallel))


def balances_by_quantiles(run: Any) -> bool:
    """True if routers balance experts by quantiles of their scores (0.19 and later), which refuses a padding mask."""
    return "quantile_balancing" in (run.moe_router_load_balancing_type or "")


def has_graph_scope(run: Any, *names: str) -> bool:
    """True if CUDA graphs capture one of these parts of a layer: "moe_router", "attn"."""
    scope = run.cuda_graph_scope
    parts = scope if isinstance(scope, (list, tuple)) else [scope]
    return any(getattr(part, "name", part) in names for part in parts)


def graph_scopes(run: Any) -> set[str]:
    """The parts of a layer that CUDA graphs capture, by the names of 0.16 to 0.19: attn, full_iteration, ..."""
    scopes = run.cuda_graph_modules or run.cuda_graph_scope or ()
    scopes = scopes if isinstance(scopes, (list, tuple, set, frozenset)) else [scopes]
    return {str(getattr(scope, "name", scope)) for scope in scopes}


def has_low_precision(run: Any) -> bool:
    """True if the model computes in fp8 or fp4."""
    return bool(run.fp8 or run.fp4)


def type_name(value: object) -> str:
    """The name of a dtype, given as torch's type or a flag's value; '' for that of the parameters."""
    name = str(value or "").removeprefix("torch.")
    return {"auto": "", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)


def has_megatron_fsdp(run: Any) -> bool:
    """True if the run has Megatron-FSDP as releases do; `--megatron-fsdp-version 2` of main shares no code with it."""
    return bool(run.use_megatron_fsdp) and run.megatron_fsdp_version != 2


def sharding_strategy(run: Any) -> str:
    """The sharding strategy of Megatron-FSDP; '' without Megatron-FSDP, and if unknown."""
    return str(run.data_parallel_sharding_strategy or "") if has_megatron_fsdp(run) else ""


def expert_data_parallel(run: Any) -> int:
    """The number of replicas of the experts; 1 if unknown."""
    ranks = data_parallel(run) * context_parallel(run) * tensor_parallel(run)
    return max(1, ranks // (expert_parallel(run) * expert_tensor_parallel(run)))


def copies_the_sequence(run: Any) -> bool:
    """True if each tensor-parallel rank has the whole sequence, which layers of experts refuse."""
    return bool(tensor_parallel(run) > 1 and not (run.sequence_parallel or run.num_experts))


def has_latent_attention(run: Any) -> bool:
    """True if layers have MLA: `--transformer-impl local` builds none, a hybrid model only D and + layers."""
    is_in_model = not is_hybrid(run) or not {"D", "+"}.isdisjoint(layers_of_hybrid(run))
    return bool(run.multi_latent_attention and run.transformer_impl != "local" and is_in_model)


def has_sparse_attention(run: Any) -> bool:
    """True if layers of attention read the keys that an indexer selects (DSA)."""
    return bool(run.experimental_attention_variant == "dsa" or "D" in layers_of_hybrid(run))


def has_gated_delta_net(run: Any) -> bool:
    """True if a layer is a GatedDeltaNet."""
    is_gpt = run.experimental_attention_variant in ("gated_delta_net", "gdn", "gdn2")
    return bool(is_gpt or "G" in layers_of_hybrid(run))
