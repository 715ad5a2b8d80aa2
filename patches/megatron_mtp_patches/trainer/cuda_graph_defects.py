"""CUDA graphs: none of these defects shows without a GPU."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import graph_scopes, has_aux_loss, recomputes_weights
from ..defects.declare import Defect, Sign

_GRAPHS = "megatron.core.transformer.cuda_graphs"
_RUNNER = f"{_GRAPHS}:_CudaGraphRunner"
_PER_LAYER = (
    "--cuda-graph-impl local, with a graph for each layer (beside --perform-rl-step, with --rl-training-cuda-graphs)"
)
_OTHERS = "--cuda-graph-impl none, or beside --perform-rl-step leave out --rl-training-cuda-graphs"


def _captures_layers(run: Any) -> bool:
    """True if Megatron's own graphs capture layers in training."""
    inference = getattr(run.inference_cuda_graph_scope, "name", run.inference_cuda_graph_scope)  # 0.18 and later
    is_one_block = inference == "block" and not run.cuda_graph_modules
    if is_one_block or (run.perform_rl_step and not run.rl_training_cuda_graphs):
        return False
    is_one_graph = bool(graph_scopes(run) & {"full_iteration", "full_iteration_inference"})
    return run.cuda_graph_impl == "local" and not is_one_graph


def _captures_routers(run: Any) -> bool:
    scopes = graph_scopes(run) - {"full"}
    return _captures_layers(run) and (not scopes or bool(scopes & {"moe", "moe_router", "moe_preprocess"}))


DEFECTS = (
    Defect(
        id="ML-4433a",
        effect="The input of a captured layer is overwritten by that of another graph before the layer's backward "
        "pass, so gradients are wrong",
        severity=4,
        signs=Sign(f"{_RUNNER}.create_fwd_graph", has="_CudagraphGlobalRecord.tensor_reuse_pool.insert(buf)"),
        affects=_captures_layers,
        when=_PER_LAYER,
        only_if="a later graph copies an input of the same shape before that backward pass, as where parts of layers "
        "are captured or several microbatches of a pipeline are in flight",
        instead=_OTHERS,
        state="fixed in 0.18.0",
        evidence="read",
        second_reading="how graphs of 0.16.1 and 0.17.1 take, return and reuse buffers, and those of 0.18.2; which "
        "layers 0.16.1 to 0.19.0 capture, and what they require of expert parallelism; doctor with graphs of layers, "
        "parts, blocks and whole iterations",
    ),
    Defect(
        id="ML-4433b",
        effect="The passes that warm up a graph add to the counts of tokens by which the expert bias is updated, or to "
        "those of global_aux_loss, so these are wrong in the step after graphs are made",
        severity=2,
        signs=Sign(f"{_RUNNER}.create_fwd_graph", has="grad_backup", lacks="buffer_backup"),
        affects=lambda run: (
            run.num_experts
            and _captures_routers(run)
            and (run.moe_router_enable_expert_bias or has_aux_loss(run, "global_aux_loss"))
        ),
        when=f"{_PER_LAYER} (no --cuda-graph-scope, or moe, moe_router or moe_preprocess in it), and "
        "--moe-router-enable-expert-bias or --moe-router-load-balancing-type global_aux_loss",
        instead=_OTHERS,
        state="fixed in 0.18.0",
        evidence="read",
        second_reading="graphs of 0.16.1, 0.17.1 and 0.18.2, when schedules make them, and which parts of a layer they "
        "capture; doctor with graphs of layers and of attention alone",
    ),
    Defect(
        id="ML-3970",
        effect="A replayed graph reads inputs whose memory was freed: wrong numbers, or a segmentation fault",
        kind="crash",
        severity=3,
        signs=Sign(
            _RUNNER,
            has="replace_with_weak_ref, self.fwd_graph_input_surface",
            lacks="replace_with_weak_ref_for_input_surface",
        ),
        affects=_captures_layers,
        when=_PER_LAYER,
        only_if="PyTorch has given the memory of these inputs back, as it may where memory is short",
        instead=_OTHERS,
        state="fixed in 0.17.0",
        evidence="reported",
        second_reading="graphs of 0.16.1, their pool of buffers, and those of 0.17.1; the threads of #3970 and #4162; "
        "doctor with graphs of layers, also with expert parallelism, for which 0.16 and 0.17 ask for padded experts",
    ),
    Defect(
        id="ML-4162",
        effect="With packed sequences a replayed graph reads the index of sequences, whose memory was freed: a "
        "segmentation fault",
        kind="crash",
        severity=3,
        signs=Sign(
            _RUNNER,
            has="_CudagraphGlobalRecord.tensor_reuse_pool.owns(arg): return arg",
            lacks="not _CudagraphGlobalRecord.tensor_reuse_pool.owns(arg)",
        ),
        affects=lambda run: _captures_layers(run) and run.rl_use_sequence_packing is not False,
        when=f"{_PER_LAYER}, and --rl-use-sequence-packing",
        only_if="sequences are packed with their total_tokens, as train_rl.py packs them, and memory is short",
        instead=_OTHERS,
        state="fixed in 0.18.0",
        evidence="reported",
        second_reading="graphs and packed sequences of 0.17.1, and who gives these their total_tokens; graphs of "
        "0.18.2; the thread of #4162; doctor with and without packing",
    ),
    Defect(
        id="ML-5975",
        effect="Graphs share memory that is still needed: what a layer saved for its backward pass may be overwritten",
        severity=3,
        signs=Sign(
            f"{_GRAPHS}:CudagraphBufferMetadata", has="cudagraph_reuse_ref_count", lacks="is_saved_for_backward"
        ),
        affects=_captures_layers,
        when=_PER_LAYER,
        instead=_OTHERS,
        state="fixed in 0.19.0",
        evidence="reported",
        second_reading="graphs of 0.16.1, 0.18.2 and 0.19.0; the thread of #5975; doctor with graphs of layers, parts, "
        "blocks and whole iterations",
    ),
    Defect(
        id="ML-6373",
        effect="Norm weights, and others whose gradients are not fused, of a recomputed part of a captured layer get "
        "no gradient (with --overlap-grad-reduce the reduction waits for them, which ends in an assertion)",
        severity=3,
        signs=Sign(
            f"{_RUNNER}.create_fwd_graph",
            has="self.params_to_backprop = self.get_connected_params(",
            lacks="needs_recompute_param_discovery",
        ),
        affects=lambda run: _captures_layers(run) and recomputes_weights(run),
        when=f"{_PER_LAYER}, and --recompute-granularity selective (with full Megatron refuses it) with "
        "--recompute-modules other than core_attn and moe_act",
        only_if="the graph captures one of these modules, and it has weights of its own",
        instead=_OTHERS,
        state="fixed on main",
        evidence="reported",
        seen_by="moves",
        second_reading="graphs of 0.16.1, 0.18.2, 0.19.0 and main, what layers recompute, and what configurations "
        "refuse; the thread of #6373 and its test; doctor with and without such modules",
    ),
    Defect(
        id="ML-6643",
        effect="With generalized tensor parallelism graphs of different layers may run in the wrong order, or end in "
        "an error about streams, because they are on one stream, which PyTorch has handed out twice",
        severity=3,
        signs=Sign(_RUNNER, has="self.stream = torch.cuda.Stream()", lacks="_get_cuda_graph_stream"),
        affects=lambda run: _captures_layers(run) and (run.gtp_weight_remat_size or 1) > 1,
        when=f"{_PER_LAYER}, and --tensor-parallel-num-weight-shards greater than --tensor-model-parallel-size",
        only_if="the run asks for more streams than PyTorch's pool has",
        instead=_OTHERS,
        state="fixed on main",
        evidence="reported",
        second_reading="graphs of 0.19.0 and main; the thread of #6643; doctor with weight shards and graphs",
    ),
    Defect(
        id="ML-6060",
        effect="With generalized tensor parallelism a graph reads or overwrites what communication of another graph "
        "still uses, so weights and gradients may be wrong",
        severity=3,
        signs=Sign(
            "megatron.core.tensor_parallel.generalized_tensor_parallelism:",
            has="_already_ag_drained",
            lacks="register_capture_comm",
        ),
        affects=lambda run: _captures_layers(run) and (run.gtp_weight_remat_size or 1) > 1,
        when=f"{_PER_LAYER}, and --tensor-parallel-num-weight-shards greater than --tensor-model-parallel-size",
        only_if="communication takes longer than what runs beside it",
        more_links=("NVIDIA/Megatron-LM#6525", "NVIDIA/Megatron-LM#6696"),
        instead=_OTHERS,
        state="fixed on main",
        evidence="reported",
        second_reading="graphs and the communication of shards of 0.19.0 and main; the thread of #6060; the commits of "
        "all three",
    ),
)
