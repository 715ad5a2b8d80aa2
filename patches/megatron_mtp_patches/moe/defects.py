"""Mixture of experts: routers, latent experts, CUDA graphs of a part of the layer."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    WITHOUT_OVERLAP_OF_EXPERTS,
    expert_parallel,
    expert_tensor_parallel,
    has_any_aux_loss,
    has_graph_scope,
    has_low_precision,
    is_hybrid,
)
from ..defects.declare import Defect, Diff, Sign

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_MOE_LAYER = "megatron.core.transformer.transformer_layer:MoETransformerLayer"


def _rounds_router(run: Any) -> bool:
    """True if the logits of routers have 16 bits."""
    return bool(run.num_experts and not run.moe_router_dtype and not run.moe_router_fusion and (run.bf16 or run.fp16))


def _balances_by_sinkhorn(run: Any) -> bool:
    """True if routers choose experts by Sinkhorn's algorithm, which refuses a loss that balances them."""
    return "sinkhorn" in (run.moe_router_load_balancing_type or "") and not run.moe_aux_loss_coeff


def _captures_router(run: Any) -> bool:
    """True if Megatron's own CUDA graphs capture the router, and the experts run between two of them.

    The layers of a GPT have no such graphs.
    """
    has_scope = has_graph_scope(run, "moe_router", "moe_preprocess")
    return bool(run.num_experts and is_hybrid(run) and run.cuda_graph_impl == "local" and has_scope)


def _transposes_router_gradients(run: Any) -> bool:
    """True if the gradient of a router's logits has the strides of [experts, tokens].

    An unfused permutation gives the probabilities such a gradient, which a sigmoid passes on and a softmax does not.
    """
    passes_on = _balances_by_sinkhorn(run) and run.moe_router_topk == 1
    if run.moe_token_dispatcher_type == "alltoall":
        return bool(run.num_experts and passes_on and not run.moe_permute_fusion)
    gathers = run.moe_token_dispatcher_type in (None, "allgather")
    # With several ranks the gradient comes out of a reduce-scatter.
    return bool(run.num_experts and passes_on and gathers and expert_parallel(run) * expert_tensor_parallel(run) == 1)


DEFECTS = (
    Defect(
        id="ML-3673",
        effect="Routers round the scores of experts to 16 bits before they choose, so among experts with almost the "
        "same score the expert bias decides, or their order without one, and not the score",
        severity=3,
        signs=Sign(
            f"{_MOE_UTILS}:topk_routing_with_score_function",
            has="scores = torch.sigmoid(logits.float()).type_as(logits)",
        ),
        affects=lambda run: (
            _rounds_router(run)
            and (run.moe_router_score_function == "sigmoid" or run.moe_router_pre_softmax)
            and not _balances_by_sinkhorn(run)
        ),
        when="--moe-router-score-function sigmoid or --moe-router-pre-softmax with --bf16 or --fp16, without "
        "--moe-router-dtype, --moe-router-fusion and --moe-router-load-balancing-type sinkhorn",
        instead="add --moe-router-dtype fp32",
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="score-experts-in-fp32",
        second_reading="routers of 0.16.1, 0.17.1 and 0.18.2, the dtype of their expert bias included; its program on "
        "0.17.1; doctor under its flags and just outside",
    ),
    Defect(
        id="ML-2765",
        effect="The MoE auxiliary losses take the sigmoid of the router's logits in 16 bits, so their gradients are "
        "rounded",
        severity=2,
        signs=Sign(f"{_MOE_UTILS}:compute_routing_scores_for_aux_loss", has="scores = torch.sigmoid(logits)"),
        affects=lambda run: (
            _rounds_router(run) and run.moe_router_score_function == "sigmoid" and has_any_aux_loss(run)
        ),
        when="--moe-router-score-function sigmoid with --moe-aux-loss-coeff and --bf16 or --fp16, without "
        "--moe-router-dtype and --moe-router-fusion",
        instead="add --moe-router-dtype fp32",
        state="fixed in 0.17.0",
        evidence="reproduced",
        patch="score-experts-in-fp32",
        second_reading="routers of 0.16.1, 0.17.1 and 0.18.2; the thread of #2765; doctor under its flags and just "
        "outside",
    ),
    Defect(
        id="ML-2977",
        effect="The two latent projections of each MoE layer never get a gradient; with --overlap-grad-reduce an "
        "assertion of DDP fails",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.moe.moe_layer:MoELayer.backward_dw",
            has="self.experts.backward_dw()",
            lacks="fc2_latent_proj",
        ),
        affects=lambda run: run.num_experts and run.moe_latent_size and run.delay_wgrad_compute,
        when="--moe-latent-size with --delay-wgrad-compute",
        instead="leave out --delay-wgrad-compute",
        state="fixed in 0.17.0",
        evidence="reproduced",
        seen_by="moves",
        second_reading="MoE layers, scheduled layers and linear layers of 0.16.1 and 0.17.1; what TransformerConfig "
        "and validate_args of both require of --delay-wgrad-compute; doctor under its flags on 0.17.1",
    ),
    Defect(
        id="ML-4500",
        effect="Routers get no gradient of the main loss, because the experts use a detached copy of the probabilities",
        severity=3,
        signs=Sign(
            f"{_MOE_LAYER}._forward_mlp_router",
            has=("self.token_dispatcher_attrs[attr_name] = attr.detach()", "attr_name.split('.')"),
        ),
        fixed_by=Sign(f"{_MOE_LAYER}._forward_mlp_expert_compute", has="'_comm_manager.token_probs'"),
        affects=lambda run: _captures_router(run) and run.moe_token_dispatcher_type == "flex",
        when="--cuda-graph-impl local with --cuda-graph-scope moe_router or moe_preprocess and "
        "--moe-token-dispatcher-type flex, in a hybrid model",
        instead="use --moe-token-dispatcher-type alltoall, or another --cuda-graph-scope",
        state="fixed in 0.18.0",
        evidence="read",
        seen_by="moves",
        second_reading="MoE layers, the models that have them and dispatchers of 0.16.1 (where such a run ends in an "
        "error) and 0.17.1; the commit of #4500 and its call in 0.18.2",
    ),
    Defect(
        id="ML-3254",
        effect="The first step ends in an error of torch.stack, because the expert biases of teacher and student are "
        "updated together",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.distributed.finalize_model_grads:_update_router_expert_bias",
            has="hasattr(module, 'expert_bias')",
            lacks="module.training",
        ),
        affects=lambda run: run.num_experts and run.moe_router_enable_expert_bias and run.export_kd_teacher_load,
        when="--moe-router-enable-expert-bias with --export-kd-teacher-load",
        only_if="the teacher has another number of experts, or experts without a bias",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the update of expert biases of 0.16.1 and 0.17.1, and what routers without gradients count; "
        "the commit of #3254",
    ),
    Defect(
        id="ML-6278",
        effect="The second layer of each latent expert starts with weights that are too small by the square root of "
        "twice the number of layers (of that number in a hybrid model), which is meant for the latent output "
        "projection only",
        severity=2,
        signs=Sign(
            "megatron.core.transformer.moe.experts:TEGroupedMLP.__init__",
            has=("self.config.output_layer_init_method", "self.config.moe_latent_size"),
            lacks="not_none(self.config.init_method) if self.config.moe_latent_size",
        ),
        affects=lambda run: run.num_experts and run.moe_latent_size and not (run.load or run.pretrained_checkpoint),
        when="--moe-latent-size in a run that starts from new weights",
        more_links=("NVIDIA/Megatron-LM#5225",),
        state="open",
        evidence="reproduced",
        second_reading="grouped and sequential experts, latent projections and scaled initializations of 0.16.1 and "
        "main; the threads of #5225 and #6278; doctor under its flags and just outside",
    ),
    Defect(
        id="ML-5761",
        effect="The model runs without autocast, because the schedule enters only one of its two contexts",
        severity=2,
        signs=Sign("megatron.core.pipeline_parallel.combined_1f1b:", has="with context_manager and outer_fp8_context:"),
        affects=lambda run: run.enable_autocast and run.overlap_moe_expert_parallel_comm,
        when="enable_autocast with overlap_moe_expert_parallel_comm",
        instead=WITHOUT_OVERLAP_OF_EXPERTS,
        more_links=("NVIDIA/Megatron-LM#5760",),
        state="fixed after main of 2026-08-22",
        evidence="read",
        second_reading="the combined schedule of 0.16.1 and main, and the ordinary one, which enters autocast; the "
        "threads of #5760 and #5761 (merged, and not in main)",
    ),
    Defect(
        id="ML-3164",
        effect="Backward fails or reads freed memory, because the input of the experts is freed after forward",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.models.gpt.fine_grained_callables:should_free_input", has="'mlp': not enable_hybridep"
        ),
        affects=lambda run: (
            run.overlap_moe_expert_parallel_comm
            and run.num_experts
            and run.num_experts == expert_parallel(run)
            and expert_tensor_parallel(run) == 1
            and run.moe_token_dispatcher_type == "alltoall"
            and not has_low_precision(run)
        ),
        when="--overlap-moe-expert-parallel-comm with --moe-token-dispatcher-type alltoall, as many expert-parallel "
        "ranks as experts and expert tensor parallelism 1, without fp8 and fp4",
        instead="use an --expert-model-parallel-size with two or more experts per rank",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="scheduled layers and dispatchers of 0.16.1 and 0.17.1, and the condition of the fix",
    ),
    Defect(
        id="ML-5442",
        effect="Upcycling a dense checkpoint ends in an error, because the two models are given in the wrong order",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.moe.upcycling_utils:",
            has="_convert_to_moe_state_dict(dense_model[i].state_dict(), moe_model[i])",
        ),
        affects=lambda run: run.moe_use_upcycling and (run.virtual_pipeline_model_parallel_size or 1) > 1,
        when="--moe-use-upcycling with virtual pipeline parallelism",
        instead="upcycle without virtual pipeline stages",
        state="fixed on main",
        evidence="reproduced",
        second_reading="upcycling of 0.16.1, 0.19.0 and main, with and without virtual stages",
    ),
    Defect(
        id="transposed-router-gradients",
        effect="Routers and all layers before them get gradients of other tokens and experts, because a product of "
        "TransformerEngine reads the transposed gradient of the logits in the order in which it lies in memory",
        severity=3,
        signs=Sign(
            f"{_MOE_UTILS}:RouterGatingLinearFunction.backward",
            has=("grad_output = grad_output.view(-1, grad_shape[-1])", "te_general_gemm("),
            lacks="contiguous()",
        ),
        affects=lambda run: _transposes_router_gradients(run) and run.moe_router_dtype != "fp64",
        when="--moe-router-load-balancing-type sinkhorn with --moe-router-topk 1, without --moe-aux-loss-coeff and "
        "--moe-router-dtype fp64, and --moe-token-dispatcher-type alltoall without --moe-permute-fusion, or allgather "
        "with --expert-model-parallel-size and --expert-tensor-parallel-size 1",
        only_if="TransformerEngine is installed, for 0.16 in a version before 2.10",
        instead="add --moe-router-dtype fp64",
        evidence="reproduced",
        patch="make-router-gradients-contiguous",
        diff=Diff(
            "megatron.core.transformer.moe.moe_utils:RouterGatingLinearFunction.backward",
            "grad_output = grad_output.contiguous()  # the kernel takes its address and its shape alone",
        ),
        second_reading="the router's gradient of 0.16.1, 0.18.2 and main; its program on 0.18.2; doctor of 0.17.1 and "
        "0.19.2 under its flags and just outside",
    ),
    Defect(
        id="sinkhorn-without-bound",
        effect="Routing by sinkhorn takes over 100,000 rounds for a microbatch where an expert is unlikely for all "
        "tokens, because rounds are repeated until its large factor changes by little, without a bound",
        kind="hang",
        severity=3,
        signs=Sign(f"{_MOE_UTILS}:sinkhorn", has="while error > tol", lacks=("range(", "max_iter")),
        affects=lambda run: run.num_experts and _balances_by_sinkhorn(run),
        when="--moe-router-load-balancing-type sinkhorn without --moe-aux-loss-coeff",
        only_if="the logits of an expert are lower than the others by about 8 or more",
        instead="use another --moe-router-load-balancing-type",
        evidence="reproduced",
        second_reading="routers of 0.16.1 and main; its program on 0.18.2; doctor of 0.17.1 and 0.19.2 under its flags",
    ),
)
