"""CUDA graphs: none of these defects shows without a GPU."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import has_aux_loss
from ..defects.declare import Defect, Sign

_GRAPHS = "megatron.core.transformer.cuda_graphs"
_RUNNER = f"{_GRAPHS}:_CudaGraphRunner"
_PER_LAYER = "--cuda-graph-impl local, with a graph for each layer"
_OTHERS = "--cuda-graph-impl transformer_engine or none"


def _scopes(run: Any) -> set[str]:
    """The captured parts, by the names of 0.16 to 0.19: attn, moe_router, full_iteration, ..."""
    scopes = run.cuda_graph_modules or run.cuda_graph_scope or ()
    scopes = scopes if isinstance(scopes, (list, tuple, set, frozenset)) else [scopes]
    return {str(getattr(scope, "name", scope)) for scope in scopes}


def _captures_layers(run: Any) -> bool:
    """True if Megatron's own graphs capture layers in training; a run that pads experts for graphs generates text."""
    captures = run.cuda_graph_impl == "local" and not run.moe_pad_experts_for_cuda_graph_inference
    return bool(captures and not _scopes(run) & {"full_iteration", "full_iteration_inference"})


DEFECTS = (
    Defect(
        id="ML-4433a",
        effect="The input of a captured layer is overwritten by another graph's before its backward pass, so gradients "
        "are wrong",
        severity=4,
        signs=Sign(f"{_RUNNER}.create_fwd_graph", has="_CudagraphGlobalRecord.tensor_reuse_pool.insert(buf)"),
        affects=_captures_layers,
        when=_PER_LAYER,
        instead=_OTHERS,
        state="fixed in 0.18.0",
        evidence="read",
        second_reading="the fixing commit; doctor with graphs of layers",
    ),
    Defect(
        id="ML-4433b",
        effect="The passes that warm up a graph change the buffers of a layer, as the counts of tokens by which the "
        "expert bias is updated, or those of global_aux_loss",
        severity=3,
        signs=Sign(f"{_RUNNER}.create_fwd_graph", has="grad_backup", lacks="buffer_backup"),
        affects=lambda run: (
            _captures_layers(run) and (run.moe_router_enable_expert_bias or has_aux_loss(run, "global_aux_loss"))
        ),
        when=f"{_PER_LAYER}, and --moe-router-enable-expert-bias or --moe-router-load-balancing-type global_aux_loss",
        instead=_OTHERS,
        state="fixed in 0.18.0",
        evidence="read",
        second_reading="the fixing commit",
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
        instead=_OTHERS,
        state="fixed in 0.17.0",
        evidence="reported",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-4162",
        effect="With packed sequences a replayed graph reads inputs whose memory was freed: a segmentation fault",
        kind="crash",
        severity=3,
        signs=Sign(
            _RUNNER,
            has="_CudagraphGlobalRecord.tensor_reuse_pool.owns(arg): return arg",
            lacks="not _CudagraphGlobalRecord.tensor_reuse_pool.owns(arg)",
        ),
        affects=lambda run: _captures_layers(run) and run.sft is not False,
        when=f"{_PER_LAYER}, and packed sequences (--sft)",
        only_if="sequences are packed",
        instead=_OTHERS,
        state="fixed in 0.18.0",
        evidence="reported",
        second_reading="the fixing commit",
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
        second_reading="the fixing commit; doctor with graphs of layers",
    ),
    Defect(
        id="ML-6373",
        effect="Parameters of a recomputed part of a captured layer get no gradient",
        severity=3,
        signs=Sign(
            f"{_RUNNER}.create_fwd_graph",
            has="self.params_to_backprop = self.get_connected_params(",
            lacks="needs_recompute_param_discovery",
        ),
        affects=lambda run: _captures_layers(run) and run.recompute_granularity,
        when=f"{_PER_LAYER}, and --recompute-granularity",
        instead=_OTHERS,
        state="fixed on main",
        evidence="reported",
        seen_by="moves",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-6643",
        effect="With generalized tensor parallelism graphs of different layers may run on one stream, which PyTorch "
        "hands out twice",
        severity=2,
        signs=Sign(_RUNNER, has="self.stream = torch.cuda.Stream()", lacks="_get_cuda_graph_stream"),
        affects=lambda run: _captures_layers(run) and (run.gtp_weight_remat_size or 1) > 1,
        when=f"{_PER_LAYER}, and --tensor-parallel-num-weight-shards greater than --tensor-model-parallel-size",
        only_if="the run uses more streams than PyTorch's pool has",
        instead=_OTHERS,
        state="fixed on main",
        evidence="reported",
        second_reading="the fixing commit",
    ),
)
